"""Words in memory that several processes share: publishing one, and waiting for it to change.

A waiter spins first, as the change usually follows within microseconds, then lets other threads run, as ranks may share
cores, then sleeps for a millisecond at a time. Every wait is bounded.
"""

from __future__ import annotations

import numpy as np

from octavo_kernels.cpu.compiled import compiled, inlined
from octavo_kernels.cpu.memory import atomic_add, atomic_load, atomic_store, futex, pause, yield_processor

FUTEX_WAIT, FUTEX_WAKE = 0, 1
EVERYONE = (1 << 31) - 1
SPINS = 40
"""Pauses of about 50 ns each: 2 us. More would keep a rank on the same core from what is waited for."""
LOW_WORD = (1 << 32) - 1
MILLISECOND = np.array([0, 1_000_000], np.int64)
"""A ``timespec``: how long a sleep lasts, unless it ends early."""


@inlined
def wait_while(word: int, value: int, yields: int, naps: int, nap: int) -> bool:
    """Wait until the word is not ``value``: spin, yield, and sleep at most ``naps`` times.

    ``nap`` is the address of a ``timespec``. Returns whether the word changed.
    """
    for _ in range(SPINS):
        if atomic_load(word) != value:
            return True
        pause()
    for _ in range(yields):
        if atomic_load(word) != value:
            return True
        yield_processor()
    for _ in range(naps):
        futex(word, FUTEX_WAIT, value & LOW_WORD, nap)
        if atomic_load(word) != value:
            return True
    return False


@compiled
def wait_for_change(word: int, value: int, yields: int, naps: int, nap: int) -> bool:
    """``wait_while``, called from Python without its lock."""
    changed: bool = wait_while(word, value, yields, naps, nap)
    return changed


@compiled
def load(word: int) -> int:
    """Read a word."""
    value: int = atomic_load(word)
    return value


@compiled
def add(word: int, amount: int) -> int:
    """Add to a word; returns the previous value."""
    value: int = atomic_add(word, amount)
    return value


@compiled
def publish(word: int, value: int, asleep: int) -> None:
    """Write a word after everything that was written before, and wake its sleepers.

    ``asleep`` is the address of their number, 0 if nobody sleeps on the word.
    """
    atomic_store(word, value)
    if asleep != 0 and atomic_load(asleep) > 0:
        futex(word, FUTEX_WAKE, EVERYONE, 0)
