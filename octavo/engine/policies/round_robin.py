"""Round robin: a sequence runs for a turn of some tokens, then gives way to waiting ones."""

from __future__ import annotations

from octavo.engine.policies.fcfs import FirstCome
from octavo.engine.policies.policy import PolicyContext
from octavo.types import Sequence

DEFAULT_TURN = 64


class RoundRobin(FirstCome):
    """While others wait, a sequence that has had its turn is preempted and goes to the end of the queue.

    This keeps TTFT low however long the outputs of other sequences are. The computed blocks stay in the prefix cache,
    so resuming is cheap unless they were evicted.
    """

    name = "decode-round-robin"
    preempts_for_waiting = True
    overtakes = False

    def __init__(self, context: PolicyContext) -> None:
        super().__init__(context)
        self.turn = context.settings.turn_tokens or DEFAULT_TURN

    def admit(self, seq: Sequence) -> None:
        super().admit(seq)
        seq.account = len(seq.tokens)

    def leave(self, seq: Sequence) -> None:
        if self._had_its_turn(seq):
            self.num_arrived += 1
            seq.order = (self.num_arrived,)

    def preempt_for(self, seq: Sequence, running: dict[int, Sequence]) -> Sequence | None:
        longest = next(iter(running.values()), None)
        return longest if longest and self._had_its_turn(longest) else None

    def _had_its_turn(self, seq: Sequence) -> bool:
        return len(seq.tokens) - int(seq.account) >= self.turn
