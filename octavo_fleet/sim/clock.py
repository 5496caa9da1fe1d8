"""Virtual clock that advances only by the duration of steps."""

from __future__ import annotations

START = 1.0
"""When a simulation begins, in virtual seconds: a time of zero means "not yet" to the scheduler."""


class Clock:
    """Gives ``now`` when called, as ``time.monotonic`` does."""

    __slots__ = ("now",)

    def __init__(self) -> None:
        self.now = START

    def __call__(self) -> float:
        return self.now
