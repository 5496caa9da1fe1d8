"""Token budget of a step under limits on ITL."""

from __future__ import annotations

from collections.abc import Iterable
from math import inf

from octavo.types import Plan

FORGETTING = 0.99
"""Forgetting factor: weight of a step in the fit, relative to the step after it."""
DOUBT = 1e4
"""Initial variance of each coefficient, relative to that of a step's time; no forgetting where their sum is larger."""
CHUNK_UNIT = 256
SEQUENCE_UNIT = 16
LEAST_CHUNK = 16
"""Prompt tokens that a step may always compute, so that prompts finish."""
OUTLIER = 4.0
"""A step's time is capped at this multiple of the expected time, for example when a kernel was compiled."""
MARGIN = 0.9
"""Predicted time of a step, at most, as a share of the limit: step times vary."""


class Pace:
    """Chunks prompts by a model of step time, learned while running.

    ``seconds = base + per_chunk_token * chunk tokens + per_sequence * sequences``, where chunk tokens are those beyond
    one for each sequence. The three are fitted to the steps so far by recursive least squares with forgetting
    (Plackett 1950; Ljung, "System Identification", section 11.2). A step computes what the model allowed, so an error
    shows in the next step, and where step time is not linear the fit follows the current workload.

    ``targets`` are the ITL targets of sequences, in seconds. The least of them bounds a step as ``max_itl`` does.
    """

    def __init__(self, max_itl: float | None) -> None:
        self.max_itl = max_itl or inf
        self._fit = [0.0, 0.0, 0.0]
        self._doubt = [[DOUBT if row == column else 0.0 for column in range(3)] for row in range(3)]
        self._num_seen = 0
        self._anyone_waits_for_tokens = False

    @property
    def per_chunk_token(self) -> float:
        """Seconds per additional prompt token."""
        return max(0.0, self._fit[1]) / CHUNK_UNIT

    def predict(self, num_chunk_tokens: float, num_sequences: float) -> float:
        """Predicted seconds of a step."""
        base, chunk, sequences = self._fit
        return (
            base + max(0.0, chunk) * num_chunk_tokens / CHUNK_UNIT + max(0.0, sequences) * num_sequences / SEQUENCE_UNIT
        )

    def learn(self, plan: Plan, num_tokens: int, seconds: float) -> None:
        """Update the model: a step over ``plan``, of ``num_tokens`` in total, took ``seconds``."""
        num_sequences = len(plan)
        self._anyone_waits_for_tokens = any(item.samples for item in plan)
        expected = self.predict(num_tokens - num_sequences, num_sequences)
        if self._num_seen > 8 and expected > 0:
            seconds = min(seconds, OUTLIER * expected)
        self._num_seen += 1
        features = (1.0, (num_tokens - num_sequences) / CHUNK_UNIT, num_sequences / SEQUENCE_UNIT)
        spread = [sum(map(float.__mul__, row, features)) for row in self._doubt]
        weight = FORGETTING + sum(map(float.__mul__, spread, features))
        error = seconds - sum(map(float.__mul__, self._fit, features))
        self._fit = [value + part / weight * error for value, part in zip(self._fit, spread, strict=True)]
        doubt = [
            [old - a * b / weight for old, b in zip(row, spread, strict=True)]
            for row, a in zip(self._doubt, spread, strict=True)
        ]
        if sum(doubt[index][index] for index in range(3)) < DOUBT:  # bounds covariance wind-up
            doubt = [[value / FORGETTING for value in row] for row in doubt]
        self._doubt = doubt

    def _bound(self, targets: Iterable[float]) -> float:
        """Most seconds that a step may be predicted to take."""
        return MARGIN * min([self.max_itl, *targets])

    def budget(self, num_running: int, limit: int, targets: Iterable[float] = ()) -> int:
        """Token budget of the next step, at most ``limit`` and at least one for each running sequence."""
        if not num_running or not self._anyone_waits_for_tokens:
            return limit
        room = self._bound(targets) - self.predict(0, num_running)
        if room >= self.per_chunk_token * limit:
            return limit
        num_chunk_tokens = int(room / self.per_chunk_token) if self.per_chunk_token else 0
        return min(limit, num_running + max(LEAST_CHUNK, num_chunk_tokens))

    def admits(self, num_running: int, targets: Iterable[float] = ()) -> bool:
        """Whether one more sequence may run in addition to ``num_running`` others."""
        return num_running == 0 or self.predict(0, num_running + 1) <= self._bound(targets)
