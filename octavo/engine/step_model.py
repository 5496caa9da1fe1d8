"""Model of step time, learned while running."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from octavo.steps.shapes import NO_DRAFTER
from octavo.types import Plan

Array = npt.NDArray[np.float64]

FORGETTING = 0.99
"""Forgetting factor: weight of a step in the fit, relative to the step after it."""
NOISE = 0.03
"""Relative standard deviation of step times; it sets how fast the first steps are believed, and no more."""
OUTLIER = 2.0
"""A step's time is capped at this multiple of the expected time, for example when a kernel was compiled."""
LEAST_SEEN = 8
"""Steps that are learned from without a cap, and after which the model can be used."""
FIRST_KNOT = 64
ROW_UNIT = 256
"""The unit of rows, in which coefficients are of the order of a step's time."""


class LinearTerms(NamedTuple):
    """The linear terms of a step's time: quantities, or the seconds of one of each."""

    steps: float
    prompts: float
    """1 for a step that has any."""
    sequences: float
    drafted_rows: float
    num_proposed: float
    num_verified: float
    context: float
    pairs: float


UNITS: Array = np.array(LinearTerms(1, 1, 16, 1 << 12, 8, 256, 1 << 16, 1 << 22), np.float64)
"""In these, coefficients are of the order of a step's time; those of a drafter's work are larger, since before it has
rested nothing but the size of a coefficient says which part of a step's time is the drafter's."""


class StepLoad(NamedTuple):
    """Quantities that determine the duration of a step."""

    rows: int
    """Tokens, drafts included."""
    sequences: int
    context: int = 0
    """Sum of the positions at which the sequences start."""
    has_prompt: bool = False
    """Whether any sequence computes more than one token."""
    pairs: float = 0.0
    """Query-key pairs of those sequences."""
    drafted_rows: int = 0
    """Rows with which the executor's drafter fills its cache: all of them, or none if it rests."""
    num_proposed: int = 0
    """Drafts that it makes for each sequence."""
    num_verified: int = 0
    """Drafts among the rows: each has logits, and they make for more padding."""

    @property
    def without_drafter(self) -> StepLoad:
        """The same step if the drafter rests."""
        return self._replace(drafted_rows=0, num_proposed=0)

    @property
    def linear(self) -> LinearTerms:
        """The quantities that a step's time is linear in."""
        drafter = self.drafted_rows, self.num_proposed
        return LinearTerms(1, self.has_prompt, self.sequences, *drafter, self.num_verified, self.context, self.pairs)


def load_of(plan: Plan) -> StepLoad:
    """The load of ``plan``."""
    chunks = [item for item in plan if len(item.tokens) > 1]
    num_verified = sum([len(item.drafts) for item in plan])
    rows, pairs = len(plan) + num_verified, 0.0
    for item in chunks:
        count = len(item.tokens)
        rows += count - 1
        pairs += count * (item.start + count / 2)
    num_proposed = max([item.num_proposed for item in plan], default=NO_DRAFTER)
    drafter = (0, 0) if num_proposed == NO_DRAFTER else (rows, num_proposed)
    return StepLoad(rows, len(plan), sum([item.start for item in plan]), bool(chunks), pairs, *drafter, num_verified)


class StepModel:
    """Seconds of a step: a fixed part, one for prompts, and terms in its rows, sequences, context and pairs.

    The time of rows is piecewise linear between ``knots``: the first rows of a step are nearly free while weights are
    read, later ones are not, and kernels differ. The other terms are linear. Between knots that no step has
    distinguished the slope is the same, because the least change of the fit, in its scaled terms, is a common slope.

    The fit is recursive least squares of relative errors, with forgetting (Plackett 1950; Ljung, "System
    Identification", section 11.2).
    """

    def __init__(self, most_rows: int) -> None:
        self.knots: Array = np.array([0, *knots_below(most_rows), most_rows], np.float64)
        """Numbers of rows, from 0 to ``most_rows``."""
        self._widths: Array = np.diff(self.knots)
        self._scales: Array = 1 / np.sqrt(self._widths * ROW_UNIT)
        self._fit: Array = np.zeros(len(UNITS) + len(self._widths))
        self._doubt: Array = np.eye(len(self._fit))
        """Covariance of the coefficients, relative to the variance of relative errors."""
        self._num_seen = 0

    @property
    def is_ready(self) -> bool:
        """Whether enough steps were seen to use the model."""
        return self._num_seen > LEAST_SEEN

    def _features(self, load: StepLoad) -> Array:
        by_row = np.clip(load.rows - self.knots[:-1], 0, self._widths) * self._scales
        return np.concatenate((np.array(load.linear, np.float64) / UNITS, by_row))

    def _at_knots(self) -> Array:
        """Seconds of as many rows as each knot has."""
        slopes = np.maximum(self._fit[len(UNITS) :], 0)
        return np.concatenate(([0.0], np.cumsum(slopes * self._widths * self._scales)))

    def _seconds_each(self) -> LinearTerms:
        """Seconds of one of each linear term; only a step itself may take less than none."""
        steps, *others = (self._fit[: len(UNITS)] / UNITS).tolist()
        return LinearTerms(steps, *[max(0.0, seconds) for seconds in others])

    def _beside_rows(self, load: StepLoad) -> float:
        """Seconds of everything but the rows."""
        return sum([seconds * number for seconds, number in zip(self._seconds_each(), load.linear, strict=True)])

    def seconds(self, load: StepLoad) -> float:
        """Predicted seconds of a step."""
        return max(0.0, float(np.interp(load.rows, self.knots, self._at_knots())) + self._beside_rows(load))

    def draft_seconds(self, rows: int, count: int) -> float:
        """Seconds of verifying each of ``count`` drafts in addition to ``rows``."""
        before, after = np.interp([rows, rows + count], self.knots, self._at_knots()).tolist()
        return float(after - before) / count + self._seconds_each().num_verified

    def curve(self, sequences: int, context: int, position: int, num_proposed: int = NO_DRAFTER) -> Array:
        """Predicted seconds of steps of as many rows as each knot has: those beyond one for each sequence are of
        prompts that have come to ``position``. ``num_proposed``: drafts that the drafter makes for each sequence."""
        each = self._seconds_each()
        pairs = np.maximum(0, self.knots - sequences) * position
        drafted = self.knots if num_proposed != NO_DRAFTER else np.zeros_like(self.knots)
        fixed = self._beside_rows(StepLoad(0, sequences, context, True, num_proposed=max(0, num_proposed)))
        by_knot: Array = each.pairs * pairs + each.drafted_rows * drafted
        return self._at_knots() + fixed + by_knot

    def learn(self, load: StepLoad, seconds: float) -> None:
        """Update the model: a step took ``seconds``, which is ignored unless it is positive."""
        if seconds <= 0:
            return
        expected = self.seconds(load)
        if self.is_ready:
            seconds = min(seconds, OUTLIER * expected) or seconds
        elif not self._num_seen:
            self._doubt *= (seconds / NOISE) ** 2
        self._num_seen += 1
        scale = max(expected, seconds)
        features = self._features(load) / scale
        spread = self._doubt @ features
        variance = float(features @ spread)
        if variance <= 0:
            return
        self._fit += spread * ((seconds / scale - float(features @ self._fit)) / (1 + variance))
        # Only what this step tells of is forgotten: what prompts cost is still known after many steps of decodes.
        self._doubt -= np.outer(spread, spread) * (
            (1 - (1 - FORGETTING) * (1 + 1 / variance)) / (FORGETTING * (1 + variance))
        )


def knots_below(most: int) -> list[int]:
    """``FIRST_KNOT`` and its doublings below ``most``; from the second on also one and a half times each."""
    doublings = [FIRST_KNOT << shift for shift in range(max(1, most.bit_length()))]
    between = [knot * 3 // 2 for knot in doublings[1:]]
    return sorted(knot for knot in doublings + between if knot < most)
