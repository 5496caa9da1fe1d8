"""The smallest ``priority`` first; who waits long enough catches up with any other."""

from __future__ import annotations

from octavo.engine.policies.policy import Policy
from octavo.types import Order, Sequence


class Priority(Policy):
    """A level of priority is worth so many seconds of waiting.

    Ages grow at one rate for all, so that who goes first of two never changes while both wait: a fixed key does,
    and nothing is sorted again.
    """

    name = "priority"

    def place(self, seq: Sequence, number: int) -> Order:
        return (self.arrival(seq) + seq.request.priority * self.ageing, number)
