"""Model of step time, learned while running."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from octavo.types import Plan

Array = npt.NDArray[np.float64]

FORGETTING = 0.99
"""Forgetting factor: weight of a step in the fit, relative to the step after it."""
NOISE = 0.03
"""Relative standard deviation of step times; it sets how fast the first steps are believed, and no more."""
OUTLIER = 4.0
"""A step's time is capped at this multiple of the expected time, for example when a kernel was compiled."""
LEAST_SEEN = 8
"""Steps that are learned from without a cap, and after which the model can be used."""
FIRST_KNOT = 64
NUM_LINEAR = 5
ROW_UNIT, SEQUENCE_UNIT, CONTEXT_UNIT, PAIR_UNIT = 256, 16, 1 << 16, 1 << 22
"""Units in which coefficients are of the order of a step's time."""


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


def load_of(plan: Plan) -> Load:
    """The load of ``plan``."""
    chunks = [item for item in plan if len(item.tokens) > 1]
    rows = len(plan) + sum([len(item.drafts) for item in plan])
    pairs = 0.0
    for item in chunks:
        count = len(item.tokens)
        rows += count - 1
        pairs += count * (item.start + count / 2)
    return Load(rows, len(plan), sum([item.start for item in plan]), bool(chunks), pairs)


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
        linear = (1.0, load.has_prompt, load.sequences / SEQUENCE_UNIT, context, pairs)
        by_row = np.clip(load.rows - self.knots[:-1], 0, self._widths) * self._scales
        return np.array([*linear, *by_row])

    def _at_knots(self) -> Array:
        """Seconds of as many rows as each knot has."""
        slopes = np.maximum(self._fit[NUM_LINEAR:], 0)
        return np.concatenate(([0.0], np.cumsum(slopes * self._widths * self._scales)))

    def _beside_rows(self, load: Load) -> float:
        """Seconds of everything but the rows."""
        base, *slopes = self._fit[:NUM_LINEAR].tolist()
        prompt, per_sequence, per_position, per_pair = [max(0.0, slope) for slope in slopes]
        attention = per_position * load.context / CONTEXT_UNIT + per_pair * load.pairs / PAIR_UNIT
        return float(base + prompt * load.has_prompt + per_sequence * load.sequences / SEQUENCE_UNIT + attention)

    def seconds(self, load: Load) -> float:
        """Predicted seconds of a step."""
        return max(0.0, float(np.interp(load.rows, self.knots, self._at_knots())) + self._beside_rows(load))

    def curve(self, sequences: int, context: int, position: int) -> Array:
        """Predicted seconds of steps of as many rows as each knot has: those beyond one for each sequence are of
        prompts that have come to ``position``."""
        per_pair = max(0.0, float(self._fit[NUM_LINEAR - 1])) / PAIR_UNIT
        pairs = np.maximum(0, self.knots - sequences) * position
        return self._at_knots() + self._beside_rows(Load(0, sequences, context, True)) + per_pair * pairs

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
