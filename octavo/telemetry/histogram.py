"""Histograms that are cheap enough to update for every token."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

LATENCY_BUCKETS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0),
    *(40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
FIRST_TOKEN_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
PER_TOKEN_BUCKETS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3),
    *(0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
CHOICES_BUCKETS = (1.0, 2.0, 5.0, 10.0, 20.0)
STEP_TOKENS_BUCKETS = (1.0, *(float(2**k) for k in range(3, 15)))
HTTP_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


def decades(highest: int) -> tuple[float, ...]:
    """1, 2, 5, 10, 20, 50 ... up to ``highest``."""
    bounds: list[float] = []
    power = 1
    while power <= highest:
        bounds += [float(step * power) for step in (1, 2, 5) if step * power <= highest]
        power *= 10
    return tuple(bounds)


class Histogram:
    """Counts of values per bucket; a bucket includes its upper bound."""

    __slots__ = ("_bounds", "_counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self.total = 0.0
        """Sum of all values."""

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self.total += value

    @property
    def count(self) -> int:
        return sum(self._counts)

    def buckets(self) -> list[tuple[str, float]]:
        """Cumulative ``(upper bound, count)`` pairs in Prometheus' form; the last bound is ``+Inf``."""
        pairs: list[tuple[str, float]] = []
        running = 0
        for bound, count in zip([*map(str, self._bounds), "+Inf"], self._counts, strict=True):
            running += count
            pairs.append((bound, float(running)))
        return pairs
