"""Matches modules against the names and patterns in the lists of a ``quantization_config``."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from octavo.errors import CheckpointError


def module_names(values: Mapping[str, Any], key: str) -> tuple[str, ...]:
    """A list of names in ``quantization_config``, empty if absent or null. Raises ``CheckpointError``."""
    found = values.get(key)
    if found is None:
        return ()
    if not isinstance(found, list | tuple) or not all(isinstance(name, str) for name in found):
        raise CheckpointError(f"config: quantization_config.{key} is {found!r}; it must be a list of module names")
    return tuple(found)


def names_module(names: Sequence[str], module: str) -> bool:
    """Whether one of the names matches the module or an enclosing module, or trailing components of either.

    A ``*`` matches any one component, as in ``model.layers.*.self_attn``.
    """
    return any(re.search(rf"(^|\.){_pattern(name)}(\.|$)", module) for name in names)


def _pattern(name: str) -> str:
    return r"[^.]+".join(re.escape(part) for part in name.split("*"))
