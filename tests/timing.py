"""Times on a machine that has other work too."""

from __future__ import annotations

import contextlib
import fcntl
import time
from collections.abc import Callable, Iterator
from pathlib import Path

PAUSES = (0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
"""Seconds before each try: neighbours slow a shared core down by half, for seconds on end, at times for minutes."""


def undisturbed(measure: Callable[[], float], enough: float) -> float:
    """The least that ``measure`` gives, tried until it is below ``enough``. Other work only ever adds to a time."""
    least = float("inf")
    for pause in PAUSES:
        time.sleep(pause)
        least = min(least, measure())
        if least < enough:
            break
    return least


@contextlib.contextmanager
def turn(is_alone: bool) -> Iterator[None]:
    """A block beside those of all other processes that test this folder, or alone while none of them is in one.

    Two files that are there anyway are locked. Whoever waits for the others to leave the room has locked the gate, so
    that no more of them come in.
    """
    with open(__file__, "rb") as gate, (Path(__file__).parent / "conftest.py").open("rb") as room:
        fcntl.flock(gate, fcntl.LOCK_EX)
        fcntl.flock(room, fcntl.LOCK_EX if is_alone else fcntl.LOCK_SH)
        fcntl.flock(gate, fcntl.LOCK_UN)
        try:
            yield
        finally:
            fcntl.flock(room, fcntl.LOCK_UN)  # closing would not do it: a process that was forked has the file, too
