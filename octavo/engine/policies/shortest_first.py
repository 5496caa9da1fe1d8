"""The shortest prompt first, which makes the mean time to the first token least."""

from __future__ import annotations

from octavo.engine.policies.policy import Policy
from octavo.types import Order, Sequence


class ShortestFirst(Policy):
    """By the tokens there are to compute before the first new one; 1,000 of them are worth so many seconds of waiting.

    How long an answer gets nobody knows, and ``max_tokens`` says only how long it may get, so that it has no say.
    """

    name = "shortest-first"

    def place(self, seq: Sequence, number: int) -> Order:
        return (self.arrival(seq) + len(seq.tokens) / 1000 * self.ageing, number)
