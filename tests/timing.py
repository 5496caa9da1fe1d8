"""Times on a machine that has other work too."""

from __future__ import annotations

import time
from collections.abc import Callable

PAUSES = (0.0, 0.5, 1.0, 2.0, 4.0, 8.0)
"""Seconds before each try."""
LOOP_SECONDS = 0.0065
"""What ``loop_seconds`` gives on a core of 2.5 GHz that nobody shares; 0.012 and more while its other half is at work,
which it is for minutes on some machines."""


def loop_seconds() -> float:
    """Processor time of a loop of plain Python, the least of some."""
    least = float("inf")
    for _ in range(5):
        started = time.thread_time()
        found: dict[int, object] = {}
        for number in range(20_000):
            found[number % 997] = number, found.get(number % 991)
        least = min(least, time.thread_time() - started)
    return least


def undisturbed(measure: Callable[[], float], enough: float) -> float:
    """The least that ``measure`` gives, tried until it is below ``enough``. Other work only ever adds to a time.

    Where plain Python takes longer than on a core of one's own, before and after, a time counts for so much less.
    """
    least = float("inf")
    for pause in PAUSES:
        time.sleep(pause)
        before, found, after = loop_seconds(), measure(), loop_seconds()
        least = min(least, found / max(1.0, min(before, after) / LOOP_SECONDS))
        if least < enough:
            break
    return least
