"""Matches modules against the names and patterns in the lists of a ``quantization_config``."""

from __future__ import annotations

import re
from collections.abc import Sequence

from octavo.errors import CheckpointError

MOST_REPEATS = 5
ESCAPES_AND_CLASSES = re.compile(r"\\.|\[[^\]]*\]")
REPEATS, REPEATED_GROUP = re.compile(r"[*+{]"), re.compile(r"\)[*+{]")


def compiled(pattern: str, key: str) -> re.Pattern[str]:
    """A pattern in a ``quantization_config``. Raises ``CheckpointError`` naming the key.

    Patterns whose matching could take very long are refused: those with repeated groups or many repeats.
    """
    wrong = f"config: quantization_config.{key}: {pattern[:200]!r}"
    plain = ESCAPES_AND_CLASSES.sub("x", pattern)
    if len(REPEATS.findall(plain)) > MOST_REPEATS or REPEATED_GROUP.search(plain):
        raise CheckpointError(f"{wrong} has repeated groups or more than {MOST_REPEATS} repeats (* or +)")
    try:
        return re.compile(pattern)
    except (re.error, OverflowError) as error:
        raise CheckpointError(f"{wrong} is not a pattern: {error}") from None


def names_module(names: Sequence[str], module: str) -> bool:
    """Whether one of the names matches the module or an enclosing module, or trailing components of either.

    A ``*`` matches any one component, as in ``model.layers.*.self_attn``.
    """
    return any(re.search(rf"(^|\.){_pattern(name)}(\.|$)", module) for name in names)


def _pattern(name: str) -> str:
    return r"[^.]+".join(re.escape(part) for part in name.split("*"))
