"""The shortest prompt first, which minimizes mean TTFT."""

from __future__ import annotations

from octavo.engine.policies.policy import Policy
from octavo.types import Order, Sequence


class ShortestFirst(Policy):
    """Orders by the tokens to compute before the next new one; 1,000 of them count as ``policy_ageing`` seconds.

    The output's length is unknown, and ``max_tokens`` is only its limit, so neither is used.
    """

    name = "shortest-first"

    def place(self, seq: Sequence, number: int) -> Order:
        return (self.arrival(seq) + len(seq.tokens) / 1000 * self.ageing, number)
