"""Earliest TTFT deadline first, with prefill limited so that running sequences meet their TPOT targets."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import inf

from octavo.engine.policies.policy import Policy, PolicyContext
from octavo.engine.waiting import WaitingQueue
from octavo.types import Order, Sequence, Status

DEFAULT_TTFT_TARGET = 1.0
LATE_SHARE = 4
"""Every n-th admission is for a sequence whose deadline has passed."""
MOST_BEHIND = 16
"""A sequence that is later than this many TPOT targets no longer limits steps: its target cannot be met."""


class Deadline(Policy):
    """The deadline of a first token is the arrival plus the TTFT target of the request, or else of the server.

    Under overload, strict order of deadlines makes every request a little late. Here late requests give way to those
    that can still meet their deadlines, and get a fixed share of the admissions instead.

    Later tokens may have a TPOT target, of the request or else of the server, for the average. So each token has a
    deadline, and prefill may lengthen a step as far as the targets of all running sequences allow. The first waiting
    sequence is not admitted while one more sequence would make steps too long for a running one's target, or for its
    own unless its first token is late. Sequences far behind their targets no longer count.
    """

    name = "deadline"

    def __init__(self, context: PolicyContext) -> None:
        super().__init__(context)
        self.target = context.settings.ttft_target or DEFAULT_TTFT_TARGET
        self.tpot_target = context.settings.tpot_target or inf
        self.late = WaitingQueue()
        self.paced: dict[int, Sequence] = {}
        """Running sequences with a TPOT target, by id."""
        self._num_admitted = 0

    def __len__(self) -> int:
        return super().__len__() + len(self.late)

    def __contains__(self, request_id: int) -> bool:
        return super().__contains__(request_id) or request_id in self.late

    def place(self, seq: Sequence, number: int) -> Order:
        return (self.arrival(seq) + (seq.request.ttft_target or self.target), number)

    def first(self) -> Sequence:
        now = self.context.clock()
        while super().__len__() and self._is_late(seq := super().first(), now):
            self.late.push(super().remove(seq.id))
        is_for_late = self._num_admitted % LATE_SHARE == LATE_SHARE - 1
        if self.late and (is_for_late or not super().__len__()):
            return self.late.first()
        return super().first()

    @staticmethod
    def _is_late(seq: Sequence, now: float) -> bool:
        """Whether the TTFT deadline was missed; a preempted sequence is not late, so that it is resumed first."""
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
        """At least the TPOT target: a sequence behind its target does not catch up at the cost of others.

        A lead over the target, less one token's time in reserve, is shared among the next step and those in flight.
        """
        now = self.context.clock() if self.paced else 0.0
        for seq, lead in self._claims(now):
            if seq.num_output_tokens:
                target = self._token_target(seq)
                yield target + max(0.0, lead - target) / (seq.num_in_flight + 1)

    def targets(self) -> Iterable[float]:
        now = self.context.clock()
        if len(self) and (first := self.first()).order[0] >= now:
            yield self._token_target(first)
        for seq, _ in self._claims(now):
            yield self._token_target(seq)

    def _claims(self, now: float) -> Iterator[tuple[Sequence, float]]:
        """Running sequences that are not too far behind their targets, with their lead in seconds."""
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
        """The sequence with the longest TPOT target; among equals the youngest."""
        return max(candidates, key=self._token_target, default=None)

    def _token_target(self, seq: Sequence) -> float:
        return seq.request.tpot_target or self.tpot_target

    def check(self) -> None:
        super().check()
        self.late.check()
        for seq in self.paced.values():
            assert seq.status is Status.RUNNING, "a sequence that does not run limits steps"
