"""Finds the sequence that makes forward passes fail: a failed step is retried in halves, each half alone.

::

    step of 8 fails    [a b c d e f g h]
    trials             [a b c d] ok   [e f g h] fails
                                      [e f] ok   [g h] fails
                                                 [g] fails, fails again: the cause    [h] ok

A step can also fail by chance, so a sequence is the cause only if it fails alone twice. One faulty sequence among n
costs about log2(n) + 2 failed steps; the others lose only time.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from octavo.types import Plan, Scheduled, Sequence, Status


class Group(NamedTuple):
    """The part of a failed plan to retry without any other sequence."""

    items: Plan
    failed_alone: bool
    """Whether this is one sequence whose step already failed without any other sequence."""


NO_GROUP = Group([], False)


class FaultIsolation:
    """The groups to retry, most suspect first, and the trial in flight."""

    def __init__(self) -> None:
        self._groups: deque[Group] = deque()
        self._tried: Group = NO_GROUP
        self._trial: Plan | None = None

    @property
    def is_active(self) -> bool:
        """Whether a trial is in flight, or a group with an unfinished sequence is still to be tried."""
        return self._trial is not None or any(_unfinished(group) for group in self._groups)

    def next_group(self) -> Plan:
        """The items to retry next; empty while that has to wait for steps in flight.

        A trial starts when none of its members is in flight any more, and no other step starts while it runs, so that
        its outcome depends on its members only.
        """
        while self._groups and self._trial is None:
            group = self._groups[0]
            items = _unfinished(group)
            if any(item.seq.num_in_flight for item in items):
                break
            self._tried = self._groups.popleft()
            if items:
                return items
        return []

    def begin(self, trial: Plan) -> None:
        """Record ``trial`` as the plan made from the last group."""
        self._trial = trial

    def acquit(self, plan: Plan) -> None:
        """Record that ``plan`` succeeded; if it was the trial, its members are no longer suspects, once they have
        computed all that failed."""
        if plan is self._trial:
            self._trial = None
            reached = {item.seq: _end(item) for item in plan}
            if any(reached.get(item.seq, _end(item)) < _end(item) for item in _unfinished(self._tried)):
                self._groups.appendleft(self._tried)

    def accuse(self, plan: Plan, members: Plan) -> Sequence | None:
        """Record that ``plan`` failed, of which ``members`` are not stale; returns the sequence that is the cause."""
        is_trial = plan is self._trial
        if is_trial:
            self._trial = None
        if len(plan) == 1 and members:
            if is_trial and self._tried.failed_alone:
                return members[0].seq
            self._groups.appendleft(Group(members, failed_alone=True))
            return None
        half = (len(members) + 1) // 2
        for items in (members[half:], members[:half]):
            if items:
                self._groups.appendleft(Group(items, failed_alone=False))
        return None


def divided(group: Plan, budget: int) -> list[tuple[Sequence, int]]:
    """The sequences of a group that still run, and how many tokens of each to compute next: all that failed, or as
    many as there is a budget for, if one has to begin further back, as its state is lost."""
    parts, num_behind = [], len(group)
    for item in group:
        num_behind -= 1
        num_tokens = min(_end(item) - item.seq.num_computed_tokens, budget - num_behind)
        if num_tokens > 0 and item.seq.status is not Status.WAITING:
            parts.append((item.seq, num_tokens))
            budget -= num_tokens
    return parts


def _unfinished(group: Group) -> Plan:
    return [item for item in group.items if item.seq.status is not Status.FINISHED]


def _end(item: Scheduled) -> int:
    return item.settled_start + len(item.tokens)
