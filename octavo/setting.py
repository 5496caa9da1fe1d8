"""One setting: its default, its allowed values, and how a value of any source is parsed."""

from __future__ import annotations

import json
import math
import typing
from collections.abc import Mapping
from dataclasses import field
from types import MappingProxyType
from typing import Any

from octavo.errors import ConfigError

SECRETS = frozenset({"api_key", "admin_key", "upstream_api_key", "grpc_api_key", "kv_transfer_key", "node_key"})
"""Settings whose values are never printed or logged."""
MOST = 10**12
"""Of a number whose setting has no other bound, in either direction."""
MOST_REAL = 10**9
"""The same of fractions: so many seconds are 31 years, and of so many GiB the bytes fit into 63 bits."""


def setting(
    default: Any,
    help: str,
    choices: tuple[str, ...] = (),
    low: float | None = None,
    high: float | None = None,
    is_json: bool = False,
    synonyms: Mapping[str, str] = MappingProxyType({}),
) -> Any:
    """A dataclass field with the metadata of a flag; values range from ``low`` to ``high``, both inclusive, or as
    ``MOST`` and ``MOST_REAL`` say.

    With ``is_json`` the value is JSON text; Python and YAML may give a mapping instead. ``synonyms`` are values that
    other servers have, and what each becomes: one of the choices, as a rule.
    """
    metadata = {"help": help, "choices": choices, "low": low, "high": high, "is_json": is_json, "synonyms": synonyms}
    return field(default=default, metadata=metadata)


class Setting(typing.NamedTuple):
    """One setting, as the command line needs it."""

    name: str
    group: str
    type: type
    optional: bool
    default: Any
    help: str
    choices: tuple[str, ...]
    low: float | None
    high: float | None
    is_json: bool
    synonyms: Mapping[str, str]

    def parse(self, value: Any) -> Any:
        """Convert a value from Python, YAML, a flag or an environment variable; raise ``ConfigError``."""
        if value is None and self.optional:
            return None
        if self.is_json and isinstance(value, dict):
            value = json.dumps(value)
        try:
            result = _convert(value, self.type)
        except (TypeError, ValueError, OverflowError):  # the last of a whole number that is no float
            expected = "a finite number" if self.type is float else self.type.__name__
            raise ConfigError(f"{self.name}: expected {expected}, got {value!r}") from None
        if result in self.synonyms:
            return self.synonyms[result]
        if self.choices and result not in self.choices:
            raise ConfigError(f"{self.name}: {value!r} is not one of {', '.join(self.choices)}")
        if self.type in (int, float):
            most = MOST if self.type is int else MOST_REAL
            low, high = -most if self.low is None else self.low, most if self.high is None else self.high
            if result < low:
                raise ConfigError(f"{self.name}: must be at least {low}, got {value!r}")
            if result > high:
                raise ConfigError(f"{self.name}: must be at most {high}, got {value!r}")
        return result


def _convert(value: Any, kind: type) -> Any:
    if kind is bool:
        words = {
            "1": True,
            "true": True,
            "yes": True,
            "on": True,
            "0": False,
            "false": False,
            "no": False,
            "off": False,
        }
        if isinstance(value, bool):
            return value
        if isinstance(value, str) and value.lower() in words:
            return words[value.lower()]
        raise ValueError
    if isinstance(value, bool) or (kind is int and isinstance(value, float)):
        raise TypeError
    if kind is str and not isinstance(value, str):
        value = str(value) if hasattr(value, "__fspath__") else value
        if not isinstance(value, str):
            raise TypeError
    result = kind(value)
    if isinstance(result, float) and not math.isfinite(result):
        raise ValueError
    return result
