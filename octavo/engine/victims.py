"""Who gives back its blocks when they run out: a choice apart from the order of admission."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from octavo.types import Sequence

ChooseVictim = Callable[[Iterator[Sequence]], Sequence | None]
"""Takes those who may be preempted, youngest first; gives one of them, or ``None`` when there is nobody."""


def youngest(candidates: Iterator[Sequence]) -> Sequence | None:
    """The last in the policy's order."""
    return next(candidates, None)


def cheapest(candidates: Iterator[Sequence]) -> Sequence | None:
    """The one with least to compute again."""
    return min(candidates, key=lambda seq: seq.num_computed_tokens, default=None)


def largest(candidates: Iterator[Sequence]) -> Sequence | None:
    """The one with most blocks, so that few are preempted."""
    return max(candidates, key=_num_held, default=None)


def _num_held(seq: Sequence) -> int:
    """Blocks of ``seq`` in the KV group that reaches furthest back, where it holds most."""
    return seq.groups[0].num_held


VICTIMS: dict[str, ChooseVictim] = {choose.__name__: choose for choose in (youngest, cheapest, largest)}
