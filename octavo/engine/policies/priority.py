"""The smallest ``priority`` first, with ageing against starvation."""

from __future__ import annotations

from octavo.engine.policies.policy import Policy
from octavo.types import Order, Sequence


class Priority(Policy):
    """A level of priority counts as ``policy_ageing`` seconds of waiting.

    All sequences age at the same rate, so the order of two never changes while both wait: the key is fixed and
    nothing is sorted again.
    """

    name = "priority"

    def place(self, seq: Sequence, number: int) -> Order:
        return (self.arrival(seq) + seq.request.priority * self.ageing, number)
