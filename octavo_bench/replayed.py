"""A cost model that repeats the times of one recorded run."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Sequence

from octavo.engine.step_times import StepWork
from octavo_fleet.sim.cost_model import CostModel
from octavo_fleet.sim.fitted import Fitted


class Replayed(CostModel):
    """A fit with the ratios of one run, at the time of the run at which they were: its pauses come when they came."""

    def __init__(self, fitted: Fitted, works: Sequence[StepWork], seconds: Sequence[float]) -> None:
        self.fitted = fitted
        self._ends = list(itertools.accumulate(seconds))
        self._ratios = [taken / fitted.expected(work) for work, taken in zip(works, seconds, strict=True)]
        self._spent = 0.0

    def seconds(self, work: StepWork) -> float:
        index = min(bisect_right(self._ends, self._spent + 1e-9), len(self._ends) - 1)  # sums are rounded
        taken = self.fitted.expected(work) * self._ratios[index]
        self._spent += taken
        return taken
