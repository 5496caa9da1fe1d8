"""Longest cached prefix first."""

from __future__ import annotations

from collections import OrderedDict

from octavo.engine.policies.policy import Policy, PolicyContext
from octavo.types import Order, Sequence

LOOKS = 8
"""Waiting sequences that are matched again each time one may be admitted."""


class LongestPrefix(Policy):
    """Orders by the tokens found in the prefix cache; 1,000 of them count as ``policy_ageing`` seconds of waiting.

    The cache changes with every step, so waiting sequences are matched again in turn, ``LOOKS`` at a time: the cost
    of a step does not depend on the queue's length, and a match that has not changed is cheap.
    """

    name = "longest-prefix"

    def __init__(self, context: PolicyContext) -> None:
        super().__init__(context)
        self._turns: OrderedDict[int, Sequence] = OrderedDict()
        """Waiting sequences by id, in the order in which they are matched again."""

    def place(self, seq: Sequence, number: int) -> Order:
        seq.account = (self.arrival(seq), number)
        return self._place_now(seq)

    def _place_now(self, seq: Sequence) -> Order:
        arrival, number = seq.account
        cache = self.context.cache
        num_cached = max([cache.match(seq, rank)[0].depth for rank in range(len(cache.ranks))]) * cache.block_size
        return (arrival - num_cached / 1000 * self.ageing, number)

    def push(self, seq: Sequence) -> None:
        super().push(seq)
        self._turns[seq.id] = seq

    def remove(self, request_id: int) -> Sequence:
        del self._turns[request_id]
        return super().remove(request_id)

    def first(self) -> Sequence:
        for _ in range(min(LOOKS, len(self._turns))):
            request_id, seq = self._turns.popitem(last=False)
            self.move(seq, self._place_now(seq))
            self._turns[request_id] = seq
        return super().first()
