"""How much a step may compute so that nobody who decodes waits longer for a token than promised."""

from __future__ import annotations

from collections.abc import Iterable
from math import inf

from octavo.types import Plan

FORGETTING = 0.99
"""What a step counts in the model after another one."""
DOUBT = 1e4
"""Variance of what nothing is known about, relative to that of a step's time; it never grows beyond."""
CHUNK_UNIT = 256
SEQUENCE_UNIT = 16
LEAST_CHUNK = 16
"""Prompt tokens a step that are computed whatever it takes, so that prompts get done."""
OUTLIER = 4.0
"""Of a step that took more times as long as expected, say because a kernel was compiled, so much counts."""
MARGIN = 0.9
"""Share of the limit that a step may be expected to take: steps differ."""


class Pace:
    """Slices prompts by a model of a step's time, learned while running.

    ``seconds = base + per_chunk_token * chunk tokens + per_sequence * sequences``, where chunk tokens are those beyond
    one for each sequence. The three are fitted to the steps so far by recursive least squares with forgetting
    (Plackett 1950; Ljung, "System Identification", section 11.2). Since a step computes what the model allowed, an
    error shows in the next step, and where steps are not linear the fit follows the work of the moment.

    ``wanted`` are seconds in which some want their next token. The least of them bounds a step as ``max_itl`` does.
    """

    def __init__(self, max_itl: float | None) -> None:
        self.max_itl = max_itl or inf
        self._fit = [0.0, 0.0, 0.0]
        self._doubt = [[DOUBT if row == column else 0.0 for column in range(3)] for row in range(3)]
        self._num_seen = 0
        self._anyone_waits_for_tokens = False

    @property
    def per_chunk_token(self) -> float:
        """Seconds that one more prompt token takes."""
        return max(0.0, self._fit[1]) / CHUNK_UNIT

    def predict(self, num_chunk_tokens: float, num_sequences: float) -> float:
        """Seconds that a step takes."""
        base, chunk, sequences = self._fit
        return (
            base + max(0.0, chunk) * num_chunk_tokens / CHUNK_UNIT + max(0.0, sequences) * num_sequences / SEQUENCE_UNIT
        )

    def learn(self, plan: Plan, num_tokens: int, seconds: float) -> None:
        """A step over ``plan``, of ``num_tokens`` in all, took ``seconds``."""
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
        if sum(doubt[index][index] for index in range(3)) < DOUBT:  # else what no step tells about would be forgotten
            doubt = [[value / FORGETTING for value in row] for row in doubt]
        self._doubt = doubt

    def _bound(self, wanted: Iterable[float]) -> float:
        """Seconds that a step may be expected to take."""
        return MARGIN * min([self.max_itl, *wanted])

    def budget(self, num_running: int, limit: int, wanted: Iterable[float] = ()) -> int:
        """Tokens for the next step, at most ``limit``; never fewer than one for each that runs."""
        if not num_running or not self._anyone_waits_for_tokens:
            return limit
        room = self._bound(wanted) - self.predict(0, num_running)
        if room >= self.per_chunk_token * limit:
            return limit
        num_chunk_tokens = int(room / self.per_chunk_token) if self.per_chunk_token else 0
        return min(limit, num_running + max(LEAST_CHUNK, num_chunk_tokens))

    def admits(self, num_running: int, wanted: Iterable[float] = ()) -> bool:
        """Whether one more may run beside ``num_running`` others."""
        return num_running == 0 or self.predict(0, num_running + 1) <= self._bound(wanted)
