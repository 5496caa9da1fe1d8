"""Turns of some tokens each, for everybody."""

from __future__ import annotations

from octavo.engine.policies.policy import Policy, Surroundings
from octavo.types import Sequence

DEFAULT_TURN = 64


class RoundRobin(Policy):
    """While others wait, who has had its turn goes to the end of the line and comes back later.

    Everybody gets a first token soon, however long the answers of the others are. What a sequence computed stays in
    the prefix cache, so that coming back costs little as long as the blocks are not needed.
    """

    name = "decode-round-robin"
    makes_place = True

    def __init__(self, around: Surroundings) -> None:
        super().__init__(around)
        self.turn = around.settings.turn_tokens or DEFAULT_TURN

    def admit(self, seq: Sequence) -> None:
        super().admit(seq)
        seq.account = len(seq.tokens)

    def leave(self, seq: Sequence) -> None:
        if self._had_its_turn(seq):
            self.num_arrived += 1
            seq.order = (self.num_arrived,)

    def who_yields(self, seq: Sequence, running: dict[int, Sequence]) -> Sequence | None:
        longest = next(iter(running.values()), None)
        return longest if longest and self._had_its_turn(longest) else None

    def _had_its_turn(self, seq: Sequence) -> bool:
        return len(seq.tokens) - int(seq.account) >= self.turn
