"""How long scheduling of the next step can be delayed while the device computes the current one.

A request that arrives after a step was scheduled waits for that step and for the one before it. So each step is
scheduled as late as possible: it then includes requests that arrived, and omits requests that ended, meanwhile.
"""

from __future__ import annotations

from collections import deque

from octavo.types import Plan

MARGIN = 0.0005
"""Safety margin in seconds: an idle device costs more than a request that joins one step later."""
LEAST_WAIT = 0.00005
"""Seconds; if waiting took less, the step had already finished, and the slack is unknown."""
NUM_SEEN = 8
"""Steps remembered per batch size class; the least slack among them is the estimate."""


class ScheduleDelay:
    """Learns how much later each step could have been scheduled without idling the device.

    The slack depends on the step that runs meanwhile. A step with prefill takes longer than decode alone, by an unknown
    amount, so the slack of a decode step of as many sequences is used.
    """

    def __init__(self) -> None:
        self._seen: dict[int, deque[float]] = {}
        """Slack in seconds of the last decode steps, by the bit length of the number of sequences."""

    def note(self, plan: Plan, idled: float, waited: float) -> None:
        """Record a decode step ``plan``: while it ran, scheduling started after ``idled`` seconds, and after that its
        result was waited for during ``waited`` seconds."""
        seconds = idled + waited if waited > LEAST_WAIT else idled / 2
        self._seen.setdefault(len(plan).bit_length(), deque(maxlen=NUM_SEEN)).append(seconds)

    def during(self, plan: Plan) -> float:
        """Slack in seconds while ``plan`` is computed; 0 before ``NUM_SEEN`` steps were recorded."""
        seen = self._seen.get(len(plan).bit_length(), ())
        return max(0.0, min(seen) - MARGIN) if len(seen) == NUM_SEEN else 0.0
