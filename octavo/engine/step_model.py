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
NUM_LINEAR = 7
ROW_UNIT, SEQUENCE_UNIT, CONTEXT_UNIT, PAIR_UNIT = 256, 16, 1 << 16, 1 << 22
"""Units in which coefficients are of the order of a step's time."""
DRAFTED_ROW_UNIT, DRAFT_UNIT = 1 << 12, 8
"""Units of a drafter's work: larger, since before it has rested nothing but the size of a coefficient says which part
of a step's time is the drafter's."""


class Load(NamedTuple):
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

    @property
    def without_drafter(self) -> Load:
        """The same step if the drafter rests."""
        return self._replace(drafted_rows=0, num_proposed=0)


def load_of(plan: Plan) -> Load:
    """The load of ``plan``."""
    chunks = [item for item in plan if len(item.tokens) > 1]
    rows = len(plan) + sum([len(item.drafts) for item in plan])
    pairs = 0.0
    for item in chunks:
        count = len(item.tokens)
        rows += count - 1
        pairs += count * (item.start + count / 2)
    num_proposed = max([item.num_proposed for item in plan], default=NO_DRAFTER)
    drafter = (0, 0) if num_proposed == NO_DRAFTER else (rows, num_proposed)
    return Load(rows, len(plan), sum([item.start for item in plan]), bool(chunks), pairs, *drafter)


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
        self._fit: Array = np.zeros(NUM_LINEAR + len(self._widths))
        self._doubt: Array = np.eye(len(self._fit))
        """Covariance of the coefficients, relative to the variance of relative errors."""
        self._num_seen = 0

    @property
    def is_ready(self) -> bool:
        """Whether enough steps were seen to use the model."""
        return self._num_seen > LEAST_SEEN

    def _features(self, load: Load) -> Array:
        context, pairs = load.context / CONTEXT_UNIT, load.pairs / PAIR_UNIT
        drafter = load.drafted_rows / DRAFTED_ROW_UNIT, load.num_proposed / DRAFT_UNIT
        linear = (1.0, load.has_prompt, load.sequences / SEQUENCE_UNIT, *drafter, context, pairs)
        by_row = np.clip(load.rows - self.knots[:-1], 0, self._widths) * self._scales
        return np.array([*linear, *by_row])

    def _at_knots(self) -> Array:
        """Seconds of as many rows as each knot has."""
        slopes = np.maximum(self._fit[NUM_LINEAR:], 0)
        return np.concatenate(([0.0], np.cumsum(slopes * self._widths * self._scales)))

    def _beside_rows(self, load: Load) -> float:
        """Seconds of everything but the rows."""
        base, *slopes = self._fit[:NUM_LINEAR].tolist()
        prompt, per_sequence, per_drafted, per_draft, per_position, per_pair = [max(0.0, slope) for slope in slopes]
        drafter = per_drafted * load.drafted_rows / DRAFTED_ROW_UNIT + per_draft * load.num_proposed / DRAFT_UNIT
        attention = per_position * load.context / CONTEXT_UNIT + per_pair * load.pairs / PAIR_UNIT
        fixed = base + prompt * load.has_prompt + per_sequence * load.sequences / SEQUENCE_UNIT
        return float(fixed + drafter + attention)

    def seconds(self, load: Load) -> float:
        """Predicted seconds of a step."""
        return max(0.0, float(np.interp(load.rows, self.knots, self._at_knots())) + self._beside_rows(load))

    def row_seconds(self, first: int, count: int) -> float:
        """Seconds of one of ``count`` rows in addition to ``first``."""
        before, after = np.interp([first, first + count], self.knots, self._at_knots()).tolist()
        return float(after - before) / count

    def curve(self, sequences: int, context: int, position: int, num_proposed: int = NO_DRAFTER) -> Array:
        """Predicted seconds of steps of as many rows as each knot has: those beyond one for each sequence are of
        prompts that have come to ``position``. ``num_proposed``: drafts that the drafter makes for each sequence."""
        *_, per_drafted, _, _, per_pair = np.maximum(self._fit[:NUM_LINEAR], 0).tolist()
        pairs = np.maximum(0, self.knots - sequences) * position
        drafted = self.knots if num_proposed != NO_DRAFTER else np.zeros_like(self.knots)
        fixed = self._beside_rows(Load(0, sequences, context, True, num_proposed=max(0, num_proposed)))
        by_knot: Array = per_pair / PAIR_UNIT * pairs + per_drafted / DRAFTED_ROW_UNIT * drafted
        return self._at_knots() + fixed + by_knot

    def learn(self, load: Load, seconds: float) -> None:
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
