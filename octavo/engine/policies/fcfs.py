"""First come, first served: the default order of waiting sequences."""

from __future__ import annotations

from octavo.engine.policies.policy import Policy
from octavo.types import Order, Sequence


class FirstCome(Policy):
    """Orders by the number of the arrival."""

    name = "fcfs"
    overtakes = True

    def place(self, seq: Sequence, number: int) -> Order:
        return (number,)
