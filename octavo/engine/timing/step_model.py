"""The work of a step, for all that predict its time, and a model of that time, learned while running."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from octavo.steps.graph_shapes import NO_DRAFTER
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


class StepWork(NamedTuple):
    """Quantities that determine the duration of a step."""

    tokens: int
    """Drafts included."""
    rows: int
    """Rows whose logits are sampled."""
    context: int
    """Cached positions read: the sum of ``seq_lens``."""
    pairs: int
    """Query-key pairs of attention, over all sequences."""
    idle: int = 0
    """1 if no other step was in flight at submission, so that launch overhead is not hidden."""
    rested: int = 0
    """1 if also no step ended in the last ``step_times.REST`` seconds, so that caches are cold and clocks are low."""
    sequences: int = 0
    has_prompt: int = 0
    """1 if any sequence computes more than one token, drafts aside."""
    drafted_rows: int = 0
    """Rows with which the executor's drafter fills its cache: all of them, or none if it rests."""
    num_proposed: int = 0
    """Drafts that it makes for each sequence."""
    num_verified: int = 0
    """Drafts among the tokens: each has logits, and they make for more padding."""

    @classmethod
    def of_decodes(cls, num_seqs: int, context: int) -> StepWork:
        """A step in which so many sequences decode, behind ``context`` positions together."""
        return cls(num_seqs, num_seqs, context + num_seqs, context + num_seqs, sequences=num_seqs)


def work_of(plan: Plan, has_drafts: bool = True) -> StepWork:
    """The work of ``plan``; or of the same step without drafts while the drafter rests."""
    context = pairs = num_verified = has_prompt = 0
    tokens = rows = len(plan)
    for item in plan:
        context += item.start
        if len(item.tokens) == 1 and not item.drafts:
            continue
        num_drafts = len(item.drafts) if has_drafts else 0
        more = len(item.tokens) - 1 + num_drafts
        tokens += more
        rows += num_drafts if item.samples else -1
        pairs += more * item.start + (more + 1) * (more + 2) // 2 - 1
        num_verified += num_drafts
        if len(item.tokens) > 1:
            has_prompt = 1
    num_proposed = max([item.num_proposed for item in plan], default=NO_DRAFTER)
    has_drafter = has_drafts and num_proposed != NO_DRAFTER
    return StepWork(
        tokens,
        rows,
        context + tokens,
        context + len(plan) + pairs,
        sequences=len(plan),
        has_prompt=has_prompt,
        drafted_rows=tokens if has_drafter else 0,
        num_proposed=num_proposed if has_drafter else 0,
        num_verified=num_verified,
    )


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


def linear_terms(work: StepWork) -> LinearTerms:
    """The quantities that a step's time is linear in; context and pairs are those beyond the step's own tokens, which
    the time of rows includes, and beyond one query of each sequence."""
    drafter = work.drafted_rows, work.num_proposed, work.num_verified
    return LinearTerms(
        1, work.has_prompt, work.sequences, *drafter, work.context - work.tokens, work.pairs - work.context
    )


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

    def _features(self, work: StepWork) -> Array:
        by_row = np.clip(work.tokens - self.knots[:-1], 0, self._widths) * self._scales
        return np.concatenate((np.array(linear_terms(work), np.float64) / UNITS, by_row))

    def _at_knots(self) -> Array:
        """Seconds of as many rows as each knot has."""
        slopes = np.maximum(self._fit[len(UNITS) :], 0)
        return np.concatenate(([0.0], np.cumsum(slopes * self._widths * self._scales)))

    def _seconds_each(self) -> LinearTerms:
        """Seconds of one of each linear term; only a step itself may take less than none."""
        steps, *others = (self._fit[: len(UNITS)] / UNITS).tolist()
        return LinearTerms(steps, *[max(0.0, seconds) for seconds in others])

    def _beside_rows(self, work: StepWork) -> float:
        """Seconds of everything but the rows."""
        return sum([seconds * number for seconds, number in zip(self._seconds_each(), linear_terms(work), strict=True)])

    def seconds(self, work: StepWork) -> float:
        """Predicted seconds of a step."""
        return max(0.0, float(np.interp(work.tokens, self.knots, self._at_knots())) + self._beside_rows(work))

    def context_seconds(self, work: StepWork) -> float:
        """Predicted seconds of what attention takes beyond the step's own tokens."""
        each, terms = self._seconds_each(), linear_terms(work)
        return each.context * terms.context + each.pairs * terms.pairs

    @property
    def pair_seconds(self) -> float:
        """Predicted seconds of a pair of query and key."""
        return self._seconds_each().pairs

    def draft_seconds(self, rows: int, count: int, position: float) -> float:
        """Seconds of verifying each of ``count`` drafts, on average at ``position``, in addition to ``rows``."""
        before, after = np.interp([rows, rows + count], self.knots, self._at_knots()).tolist()
        each = self._seconds_each()
        return float(after - before) / count + each.num_verified + each.pairs * position

    def curve(self, sequences: int, context: int, position: int, num_proposed: int = NO_DRAFTER) -> Array:
        """Predicted seconds of steps of as many rows as each knot has: those beyond one for each sequence are of
        prompts that have come to ``position``. ``num_proposed``: drafts that the drafter makes for each sequence."""
        each = self._seconds_each()
        pairs = np.maximum(0, self.knots - sequences) * position
        drafted = self.knots if num_proposed != NO_DRAFTER else np.zeros_like(self.knots)
        fixed = self._beside_rows(
            StepWork(0, 0, context, context, sequences=sequences, has_prompt=1, num_proposed=max(0, num_proposed))
        )
        by_knot: Array = each.pairs * pairs + each.drafted_rows * drafted
        return self._at_knots() + fixed + by_knot

    def learn(self, work: StepWork, seconds: float) -> None:
        """Update the model: a step took ``seconds``, which is ignored unless it is positive."""
        if seconds <= 0:
            return
        expected = self.seconds(work)
        if self.is_ready:
            seconds = min(seconds, OUTLIER * expected) or seconds
        elif not self._num_seen:
            self._doubt *= (seconds / NOISE) ** 2
        self._num_seen += 1
        scale = max(expected, seconds)
        features = self._features(work) / scale
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
