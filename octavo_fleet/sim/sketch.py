"""Percentiles of any number of values in bounded memory."""

from __future__ import annotations

import math
from collections import defaultdict

GROWTH = 1.01
"""Each bucket's bounds are 1 % apart, so a percentile is wrong by at most half of that (DDSketch, arXiv 1908.10693)."""
SCALE = 1 / math.log(GROWTH)
LEAST = 1e-9


class Sketch:
    """Histogram of non-negative values with logarithmic buckets."""

    def __init__(self) -> None:
        self._counts: defaultdict[int, int] = defaultdict(int)
        self.count = 0
        self.total = 0.0
        self.most = 0.0

    def add(self, value: float, times: int = 1) -> None:
        """Count ``value`` ``times`` times."""
        self._counts[int(math.log(max(value, LEAST)) * SCALE // 1)] += times
        self.count += times
        self.total += value * times
        if value > self.most:
            self.most = value

    def merge(self, other: Sketch) -> None:
        """Add the counts of ``other``."""
        for bucket, count in other._counts.items():
            self._counts[bucket] += count
        self.count += other.count
        self.total += other.total
        self.most = max(self.most, other.most)

    def percentile(self, percent: float) -> float:
        """The value that ``percent`` percent of the values do not exceed; NaN without values."""
        if not self.count:
            return math.nan
        rank = percent / 100 * (self.count - 1)
        seen = 0
        for bucket in sorted(self._counts):
            seen += self._counts[bucket]
            if seen > rank:
                return min(self.most, math.exp((bucket + 0.5) / SCALE))
        return self.most

    def summary(self) -> dict[str, float]:
        """Mean, percentiles and maximum."""
        mean = self.total / self.count if self.count else math.nan
        percentiles = {f"p{percent}": self.percentile(percent) for percent in (50, 90, 95, 99)}
        return {"mean": mean, **percentiles, "max": self.most}
