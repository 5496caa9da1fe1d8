"""Who makes a forward pass fail: the sequences of a failed step are tried again in halves, each half alone.

::

    step of 8 fails    [a b c d e f g h]
    trials             [a b c d] ok   [e f g h] fails
                                      [e f] ok   [g h] fails
                                                 [g] fails, fails again: convicted    [h] ok

A step can also fail by chance, so nobody is convicted for failing alone once. One guilty sequence among n
costs about log2(n) + 2 failed steps; the innocent lose time and nothing else.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from octavo.types import Plan, Sequence, Status


class Group(NamedTuple):
    """Sequences to be tried without anybody else: the part of a failed plan that is to be repeated."""

    items: Plan
    failed_alone: bool
    """Whether this is one sequence whose step failed with nobody else in it."""


NOBODY = Group([], False)


class Suspects:
    """The groups to be tried, most suspect first, and the trial under way."""

    def __init__(self) -> None:
        self._groups: deque[Group] = deque()
        self._tried: Group = NOBODY
        self._trial: Plan | None = None

    @property
    def is_active(self) -> bool:
        """Whether someone is being tried, or still has to be. Who has ended meanwhile has not."""
        return self._trial is not None or any(_unfinished(group) for group in self._groups)

    def next_group(self) -> Plan:
        """What to repeat next; empty when that has to wait for steps in flight.

        A trial starts when none of its members is in flight any more, and nobody starts beside it: its
        verdict must be about nobody else.
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
        """``trial`` is the plan made of the group last taken."""
        self._trial = trial

    def acquit(self, plan: Plan) -> None:
        """``plan`` succeeded; if it was the trial, its members are free again."""
        if plan is self._trial:
            self._trial = None

    def accuse(self, plan: Plan, members: Plan) -> Sequence | None:
        """``plan`` failed; ``members`` is what of it still counts. Returns who is hereby convicted, if anyone."""
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


def _unfinished(group: Group) -> Plan:
    return [item for item in group.items if item.seq.status is not Status.FINISHED]
