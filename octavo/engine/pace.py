"""How much a step may compute so that nobody who decodes waits longer for a token than promised."""

from __future__ import annotations

from octavo.types import Plan

LEARNING_RATE = 0.2
CHUNK_UNIT = 256
"""Prompt tokens that weigh as much in learning as one step, or ``SEQUENCE_UNIT`` sequences."""
SEQUENCE_UNIT = 64
LEAST_CHUNK = 16
"""Prompt tokens a step that are computed whatever it takes, so that prompts get done."""
OUTLIER = 4.0
"""Of a step that took more times as long as expected, say because a kernel was compiled, so much counts."""
MARGIN = 0.9
"""Share of the limit that a step may be expected to take: steps differ."""


class Pace:
    """Slices prompts by a model of a step's time, learned while running.

    ``seconds = base + per_chunk_token * chunk tokens + per_sequence * sequences``, where chunk tokens are those beyond
    one for each sequence. After every step, the three are corrected by a share of the error, along the step's own
    features (normalised least mean squares, Widrow and Hoff 1960). What a step is told to compute is what the
    next correction is about, so that the model need only be right where it is used.
    """

    def __init__(self, max_itl: float) -> None:
        self.limit = max_itl * MARGIN
        self.base = 0.0
        self.per_chunk_token = 0.0
        self.per_sequence = 0.0
        self._num_seen = 0
        self._anyone_waits_for_tokens = False

    def predict(self, num_chunk_tokens: float, num_sequences: float) -> float:
        """Seconds that a step takes."""
        return self.base + self.per_chunk_token * num_chunk_tokens + self.per_sequence * num_sequences

    def learn(self, plan: Plan, num_tokens: int, seconds: float) -> None:
        """A step over ``plan``, of ``num_tokens`` in all, took ``seconds``."""
        num_sequences = len(plan)
        self._anyone_waits_for_tokens = any(item.samples for item in plan)
        expected = self.predict(num_tokens - num_sequences, num_sequences)
        if self._num_seen > 2 and expected > 0:
            seconds = min(seconds, OUTLIER * expected)
        chunk = (num_tokens - num_sequences) / CHUNK_UNIT
        sequences = num_sequences / SEQUENCE_UNIT
        rate = max(LEARNING_RATE, 1 / (1 + self._num_seen))
        step = rate * (seconds - expected) / (1 + chunk * chunk + sequences * sequences)
        self.base += step
        self.per_chunk_token = max(0.0, self.per_chunk_token + step * chunk / CHUNK_UNIT)
        self.per_sequence = max(0.0, self.per_sequence + step * sequences / SEQUENCE_UNIT)
        self._num_seen += 1

    def budget(self, num_running: int, limit: int) -> int:
        """Tokens for the next step, at most ``limit``; never fewer than one for each that runs."""
        if not self._anyone_waits_for_tokens:
            return limit
        room = self.limit - self.predict(0, num_running)
        if room >= self.per_chunk_token * limit:
            return limit
        num_chunk_tokens = max(LEAST_CHUNK, int(room / self.per_chunk_token) if self.per_chunk_token else LEAST_CHUNK)
        return min(limit, num_running + num_chunk_tokens)

    def admits(self, num_running: int) -> bool:
        """Whether one more may run beside ``num_running`` others."""
        return num_running == 0 or self.predict(LEAST_CHUNK, num_running + 1) <= self.limit
