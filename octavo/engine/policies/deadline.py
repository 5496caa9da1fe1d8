"""The earliest deadline for a first token goes first, and nobody else's work holds up the tokens after it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import inf

from octavo.engine.policies.policy import Policy, Surroundings
from octavo.engine.waiting import WaitingQueue
from octavo.types import Order, Sequence, Status

DEFAULT_TTFT_TARGET = 1.0
LATE_SHARE = 4
"""One of so many admissions is for those whose deadline has passed."""
MOST_BEHIND = 16
"""Who is behind by the time of more tokens has no claim any more: nothing could keep its target, or it is too late."""


class Deadline(Policy):
    """A request should have its first token some seconds after its arrival: its own target, or the server's.

    When more comes than can be served in time, strict order of deadlines makes everybody late, each a little. Here
    who is late steps aside for those who can still be in time, and gets a fixed share of the admissions instead.

    For the tokens after the first there may be a target too: its own, or the server's, if there is one. It is about
    the average. So each token has a deadline, and prompts may take as much of a step as all who wait for a token can
    bear; the first in line waits where one more would make steps too long for somebody's target, and for its own as
    long as its first token is not late. Who falls far behind steps aside here too.
    """

    name = "deadline"
    has_targets = True

    def __init__(self, around: Surroundings) -> None:
        super().__init__(around)
        self.target = around.settings.ttft_target or DEFAULT_TTFT_TARGET
        self.tpot_target = around.settings.tpot_target or inf
        self.late = WaitingQueue()
        self.paced: dict[int, Sequence] = {}
        """Those who run and have a target for each token, by id."""
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
        if self._token_target(seq) < inf:
            self.paced[seq.id] = seq

    def leave(self, seq: Sequence) -> None:
        self.paced.pop(seq.id, None)
        seq.account = None

    def seconds_left(self) -> Iterable[float]:
        """Until the deadline of the next token, or the target: what is lost is not made good at the cost of others.

        The time of one token is kept in reserve. Steps in flight come before the next one, and use as much of a lead.
        """
        now = self.around.clock() if self.paced else 0.0
        for seq, lead in self._claims(now):
            if seq.num_output_tokens:
                target = self._token_target(seq)
                yield target + max(0.0, lead - target) / (seq.num_in_flight + 1)

    def targets(self) -> Iterable[float]:
        now = self.around.clock()
        if len(self) and (first := self.first()).order[0] >= now:
            yield self._token_target(first)
        for seq, _ in self._claims(now):
            yield self._token_target(seq)

    def _claims(self, now: float) -> Iterator[tuple[Sequence, float]]:
        """Those who run and are not too far behind their targets, and by how many seconds they are ahead of them."""
        for seq in self.paced.values():
            if not seq.num_output_tokens:
                yield seq, 0.0
                continue
            if seq.account is None:
                seq.account = now, seq.num_output_tokens
            since, num_tokens = seq.account
            target = self._token_target(seq)
            lead = since + target * (seq.num_output_tokens - num_tokens) - now
            if lead > -MOST_BEHIND * target:
                yield seq, lead

    def choose_victim(self, candidates: Iterator[Sequence]) -> Sequence | None:
        """Who has most time for each token; among equals the youngest."""
        return max(candidates, key=self._token_target, default=None)

    def _token_target(self, seq: Sequence) -> float:
        return seq.request.tpot_target or self.tpot_target

    def check(self) -> None:
        super().check()
        self.late.check()
        for seq in self.paced.values():
            assert seq.status in (Status.RUNNING, Status.YIELDING), "one that does not run slows those who do"
