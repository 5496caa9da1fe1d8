"""LoRA adapters that prompts of this process may name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from octavo.config import ModelSettings, parse_lora_modules
from octavo.errors import InvalidParameter
from octavo.weights.adapter_files import digest


class Adapter(NamedTuple):
    """What a request for an adapter says of it; the default is the base model."""

    name: str = ""
    cache_salt: str = ""
    """Differs from that of any other content, as blocks of the prefix cache may outlive this process."""


BASE = Adapter()


def adapters_of(settings: ModelSettings) -> dict[str, Adapter]:
    """The adapters in the settings by name. Raises ``ConfigError`` for one that cannot be read."""
    modules = parse_lora_modules(settings.lora_modules) if settings.enable_lora else {}
    return {name: Adapter(name, f"{digest(path)}:") for name, path in modules.items()}


def chosen(name: str | None, adapters: Mapping[str, Adapter]) -> Adapter:
    """The adapter called ``name``, ``None`` for the base model. Raises ``InvalidParameter``."""
    if name is None:
        return BASE
    if not isinstance(name, str) or name not in adapters:
        known = f"there are {', '.join(adapters)}" if adapters else "enable_lora and lora_modules load some"
        raise InvalidParameter("adapter", f"'adapter' must be the name of a loaded adapter, not {name!r}; {known}.")
    return adapters[name]
