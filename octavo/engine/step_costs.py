"""Duration of decode steps by their number of rows, as measured while running."""

from __future__ import annotations

from bisect import bisect_left

LEAST_SEEN = 3
"""Steps until a duration counts; the least of them is taken, as kernels are compiled in the first."""
RATE = 0.1
"""Weight of a new duration against those before, in their logarithms."""
DRIFT = 0.03
"""Part of ``RATE`` that is taken to concern steps of every size, such as contexts that grow."""
OUTLIER = 4.0
"""Largest ratio of a duration to the expected one that is learnt from."""
FAR_LESS = 0.7
"""A duration that is so much less than the expected one replaces it: those before included compilation or captures."""
EXACT_ROWS = 16
"""Steps of fewer rows are kept apart; above, there are eight classes for each power of two."""


class StepCosts:
    """Seconds of a step by its rows: known for the sizes that have run, interpolated between them.

    Above the largest known size the duration is taken to be the same: so a size is tried once, and then known.
    """

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}
        """By class of size, divided by ``_scale``."""
        self._num_seen: dict[int, int] = {}
        self._known: list[int] = []
        self._scale = 1.0

    def note(self, num_rows: int, seconds: float) -> None:
        """Record a step of decodes, whose rows include its drafts."""
        size = _class_of(num_rows)
        seen = self._num_seen[size] = self._num_seen.get(size, 0) + 1
        if seen <= LEAST_SEEN:
            self._seconds[size] = min(seconds / self._scale, self._seconds.get(size, float("inf")))
            if seen == LEAST_SEEN:
                self._known.insert(bisect_left(self._known, size), size)
            return
        ratio = seconds / (self._seconds[size] * self._scale)
        if ratio < FAR_LESS:
            self._seconds[size] *= ratio
            return
        ratio = min(max(ratio, 1 / OUTLIER), OUTLIER)
        self._scale *= ratio**DRIFT
        self._seconds[size] *= ratio ** (RATE - DRIFT)

    def seconds(self, num_rows: int) -> float | None:
        """Expected duration of a step; ``None`` before any size is known."""
        known = self._known
        if not known:
            return None
        at = bisect_left(known, num_rows)
        if at == len(known):
            return self._seconds[known[-1]] * self._scale
        above = self._seconds[known[at]]
        if known[at] == num_rows or at == 0:
            return above * self._scale
        below, part = self._seconds[known[at - 1]], (num_rows - known[at - 1]) / (known[at] - known[at - 1])
        return (below + part * (above - below)) * self._scale


def _class_of(num_rows: int) -> int:
    """The least number of rows of the class that ``num_rows`` is in."""
    shift = max(0, num_rows.bit_length() - 4) if num_rows >= EXACT_ROWS else 0
    return num_rows >> shift << shift
