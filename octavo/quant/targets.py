"""Matches modules against the names and patterns in the lists of a ``quantization_config``."""

from __future__ import annotations

import re
from collections.abc import Sequence


def names_module(names: Sequence[str], module: str) -> bool:
    """Whether one of the names matches the module or an enclosing module, or trailing components of either.

    A ``*`` matches any one component, as in ``model.layers.*.self_attn``.
    """
    return any(re.search(rf"(^|\.){_pattern(name)}(\.|$)", module) for name in names)


def _pattern(name: str) -> str:
    return r"[^.]+".join(re.escape(part) for part in name.split("*"))
