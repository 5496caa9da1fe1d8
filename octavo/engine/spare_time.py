"""How long the next step need not be decided yet, since the device is busy with one.

A request that comes after a step was decided waits for that step and for the one before it. So a step that follows
another one is decided as late as may be: whoever comes meanwhile is in it, and whoever leaves is not.
"""

from __future__ import annotations

from collections import deque

from octavo.types import Plan

MARGIN = 0.0005
"""Seconds that are left to chance: a device that has to wait costs more than a request that is late."""
LEAST_WAIT = 0.00005
"""Seconds; a result that took less was there already, for who knows how long."""
NUM_SEEN = 8
"""Steps that are looked back on: where so many in a row had time to spare, the next one has."""


class SpareTime:
    """Learns how much later each step could have been decided without the device waiting for it.

    That depends on the step that ran meanwhile. One that has a prompt in it takes longer than one that has not, by how
    much is not known, so it is taken for one that has not.
    """

    def __init__(self) -> None:
        self._seen: dict[int, deque[float]] = {}
        """Seconds by the bits of the number of sequences, of steps with one token of each."""

    def note(self, plan: Plan, idled: float, waited: float) -> None:
        """While ``plan``, one token of each of its sequences, was computed, the next step was decided after ``idled``
        seconds, and then ``plan`` was waited for."""
        seconds = idled + waited if waited > LEAST_WAIT else idled / 2
        self._seen.setdefault(len(plan).bit_length(), deque(maxlen=NUM_SEEN)).append(seconds)

    def beside(self, plan: Plan) -> float:
        """Seconds to spare while ``plan`` is computed; 0 while too little is known."""
        seen = self._seen.get(len(plan).bit_length(), ())
        return max(0.0, min(seen) - MARGIN) if len(seen) == NUM_SEEN else 0.0
