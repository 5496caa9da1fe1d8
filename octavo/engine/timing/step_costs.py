"""Duration of decode steps by their number of rows, as measured while running."""

from __future__ import annotations

from bisect import bisect_left

LEAST_SEEN = 3
"""Steps until a duration counts; the least of them is taken, as kernels are compiled in the first."""
RATE = 0.1
"""Weight of a new duration against those before, in their logarithms; of the first few it is that of their mean."""
DRIFT = 0.03
"""Part of ``RATE`` that is taken to concern steps of every size, such as contexts that grow."""
OUTLIER = 4.0
"""Largest ratio of a duration to the expected one that is learnt from."""
FAR_LESS = 0.7
"""A duration that is so much less than the expected one replaces it: those before included compilation or captures."""
EXACT_ROWS = 16
"""Steps of fewer rows are kept apart; above, there are eight classes for each power of two."""


class Drift:
    """What makes steps of every size slower or faster, such as the device's clock and growing contexts."""

    scale = 1.0


class StepCosts:
    """Seconds of a step by its rows: known for the sizes that have run, interpolated between them.

    Above the largest known size the duration is taken to be the same: so a size is tried once, and then known.
    """

    def __init__(self, drift: Drift | None = None) -> None:
        """``drift`` is that of another kind of steps, on the same device."""
        self.drift = drift or Drift()
        self._seconds: dict[int, float] = {}
        """By class of size, divided by the drift."""
        self._num_seen: dict[int, int] = {}
        self._known: list[int] = []

    def note(self, num_rows: int, seconds: float) -> None:
        """Record a step of decodes, whose rows include its drafts."""
        size = _class_of(num_rows)
        seen = self._num_seen[size] = self._num_seen.get(size, 0) + 1
        if seen <= LEAST_SEEN:
            self._seconds[size] = min(seconds / self.drift.scale, self._seconds.get(size, float("inf")))
            if seen == LEAST_SEEN:
                self._known.insert(bisect_left(self._known, size), size)
            return
        ratio = seconds / (self._seconds[size] * self.drift.scale)
        if ratio < FAR_LESS:
            self._seconds[size] *= ratio
            return
        ratio = min(max(ratio, 1 / OUTLIER), OUTLIER)
        self.drift.scale *= ratio**DRIFT
        self._seconds[size] *= ratio ** (max(RATE, 1 / seen) - DRIFT)

    def forget(self) -> None:
        """No size is known any more."""
        self._seconds, self._num_seen, self._known = {}, {}, []

    def seconds(self, num_rows: int, least: tuple[int, float] | None = None) -> float | None:
        """Expected duration of a step; ``None`` before any size is known.

        ``least``: fewer rows, and a duration that any step exceeds. Below the smallest known size it is interpolated
        from there, so that smaller sizes are tried, too.
        """
        known = self._known
        if not known:
            return None
        at = bisect_left(known, num_rows)
        if at == len(known):
            return self._seconds[known[-1]] * self.drift.scale
        above = self._seconds[known[at]] * self.drift.scale
        if known[at] == num_rows:
            return above
        if at > 0:
            least = known[at - 1], self._seconds[known[at - 1]] * self.drift.scale
        if least is None:
            return above
        return least[1] + (num_rows - least[0]) / (known[at] - least[0]) * (above - least[1])

    def covers(self, num_rows: int) -> bool:
        """Whether steps of as many rows, or of more, have run."""
        return bool(self._known) and num_rows <= self._known[-1]


def _class_of(num_rows: int) -> int:
    """The least number of rows of the class that ``num_rows`` is in."""
    shift = max(0, num_rows.bit_length() - 4) if num_rows >= EXACT_ROWS else 0
    return num_rows >> shift << shift
