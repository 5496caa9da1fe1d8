"""Which running sequence is preempted when blocks run out: the setting ``preemption_victim``.

Without it, the scheduling policy says (``Policy.choose_victim``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from octavo.types import Sequence

ChooseVictim = Callable[[Iterator[Sequence]], Sequence | None]
"""Takes the sequences that may be preempted, youngest first; returns one of them, or ``None`` if there are none."""


def youngest(candidates: Iterator[Sequence]) -> Sequence | None:
    """The last sequence in the policy's order."""
    return next(candidates, None)


def cheapest(candidates: Iterator[Sequence]) -> Sequence | None:
    """The sequence with the fewest tokens to recompute."""
    return min(candidates, key=lambda seq: seq.num_computed_tokens, default=None)


def largest(candidates: Iterator[Sequence]) -> Sequence | None:
    """The sequence with the most blocks, so that few are preempted: of the first KV group, which reaches furthest
    back."""
    return max(candidates, key=lambda seq: seq.groups[0].num_held, default=None)


VICTIMS: dict[str, ChooseVictim] = {choose.__name__: choose for choose in (youngest, cheapest, largest)}
