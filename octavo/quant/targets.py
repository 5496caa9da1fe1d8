"""Which modules a ``quantization_config`` means by the names and patterns in its lists."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from octavo.errors import CheckpointError


def module_names(values: Mapping[str, Any], key: str) -> tuple[str, ...]:
    """A list of names in ``quantization_config``, empty where it is absent or null. Raises ``CheckpointError``."""
    found = values.get(key)
    if found is None:
        return ()
    if not isinstance(found, list | tuple) or not all(isinstance(name, str) for name in found):
        raise CheckpointError(f"config: quantization_config.{key} is {found!r}; it must be a list of module names")
    return tuple(found)


def names_module(names: Sequence[str], module: str) -> bool:
    """Whether one of the names is that of the module, of a module around it, or the last parts of either.

    A ``*`` stands for any one part: ``model.layers.*.self_attn`` and ``lm_head`` are as files have them.
    """
    return any(re.search(rf"(^|\.){_pattern(name)}(\.|$)", module) for name in names)


def _pattern(name: str) -> str:
    return r"[^.]+".join(re.escape(part) for part in name.split("*"))
