"""The earliest deadline for a first token goes first."""

from __future__ import annotations

from octavo.engine.policies.policy import Policy, Surroundings
from octavo.engine.waiting import WaitingQueue
from octavo.types import Order, Sequence

DEFAULT_TTFT_TARGET = 1.0
LATE_SHARE = 4
"""One of so many admissions is for those whose deadline has passed."""


class Deadline(Policy):
    """A request should have its first token some seconds after its arrival: its own target, or the server's.

    When more comes than can be served in time, strict order of deadlines makes everybody late, each a little. Here
    who is late steps aside for those who can still be in time, and gets a fixed share of the admissions instead.
    """

    name = "deadline"

    def __init__(self, around: Surroundings) -> None:
        super().__init__(around)
        self.target = around.settings.ttft_target or DEFAULT_TTFT_TARGET
        self.late = WaitingQueue()
        self._num_admitted = 0

    def __len__(self) -> int:
        return super().__len__() + len(self.late)

    def __contains__(self, request_id: int) -> bool:
        return super().__contains__(request_id) or request_id in self.late

    def place(self, seq: Sequence, number: int) -> Order:
        return (self.arrival(seq) + (seq.request.ttft_target or self.target), number)

    def first(self) -> Sequence:
        now = self.around.clock()
        while super().__len__() and self._is_late(seq := super().first(), now):
            self.late.push(super().remove(seq.id))
        is_for_late = self._num_admitted % LATE_SHARE == LATE_SHARE - 1
        if self.late and (is_for_late or not super().__len__()):
            return self.late.first()
        return super().first()

    @staticmethod
    def _is_late(seq: Sequence, now: float) -> bool:
        """Whether the deadline has passed; who was preempted since then has had its turn, and comes back first."""
        return seq.order[0] < now and not seq.first_scheduled

    def remove(self, request_id: int) -> Sequence:
        return self.late.remove(request_id) if request_id in self.late else super().remove(request_id)

    def admit(self, seq: Sequence) -> None:
        super().admit(seq)
        self._num_admitted += 1

    def check(self) -> None:
        super().check()
        self.late.check()
