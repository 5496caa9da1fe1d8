"""Who finds most of its prompt in the cache goes first."""

from __future__ import annotations

from collections import OrderedDict

from octavo.engine.policies.policy import Policy, Surroundings
from octavo.types import Order, Sequence

LOOKS = 8
"""How many of those who wait are looked up again each time somebody may enter."""


class LongestPrefix(Policy):
    """By the tokens found in the prefix cache; 1,000 of them are worth so many seconds of waiting.

    What is cached changes with every step. So all who wait are looked up again in turn, a few at a time: the cost
    of a step does not depend on how many wait, and a look that finds what the last one found is short.
    """

    name = "longest-prefix"

    def __init__(self, around: Surroundings) -> None:
        super().__init__(around)
        self._turns: OrderedDict[int, Sequence] = OrderedDict()
        """Those who wait, by id, in the order in which they are looked up again."""

    def place(self, seq: Sequence, number: int) -> Order:
        seq.account = (self.arrival(seq), number)
        return self._place_now(seq)

    def _place_now(self, seq: Sequence) -> Order:
        arrival, number = seq.account
        cache = self.around.cache
        num_cached = cache.match(seq)[0].depth * cache.block_size
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
