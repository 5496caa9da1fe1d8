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
PRUDENCE = 0.8
"""Part of a step of prompts that is waited for: what such steps take differs."""


class ScheduleDelay:
    """Learns how much later each step could have been scheduled without idling the device.

    The slack depends on the step that runs meanwhile. For one of decodes it is that of earlier steps of as many
    sequences, for one of prompts a share of the seconds that it is predicted to take. What a step with both takes is
    not known well enough, and a step behind it that is decided late has fewer prompts to compute together.
    """

    def __init__(self) -> None:
        self._seen: dict[int, deque[float]] = {}
        """Slack in seconds of the last decode steps, by the bit length of the number of sequences."""
        self._shares: deque[float] = deque(maxlen=NUM_SEEN)
        """Slack of the last steps of prompts, as a share of the seconds that they were predicted to take."""

    def note(self, plan: Plan, idled: float, waited: float, predicted: float | None) -> None:
        """Record the step ``plan``: while it ran, scheduling started after ``idled`` seconds, and after that its result
        was waited for during ``waited`` seconds. ``predicted``: its seconds, if it was of prompts."""
        seconds = idled + waited if waited > LEAST_WAIT else idled / 2
        if predicted is None:
            self._seen.setdefault(len(plan).bit_length(), deque(maxlen=NUM_SEEN)).append(seconds)
        elif predicted > 0:
            self._shares.append(seconds / predicted)

    def during(self, plan: Plan, predicted: float | None) -> float:
        """Slack in seconds while ``plan`` is computed; 0 before ``NUM_SEEN`` such steps were recorded."""
        seen = self._seen.get(len(plan).bit_length(), ())
        slack = min(seen) if len(seen) == NUM_SEEN else 0.0
        if predicted is not None and len(self._shares) == NUM_SEEN:
            slack = max(slack, PRUDENCE * predicted * min(1.0, *self._shares))
        return max(0.0, slack - MARGIN)
