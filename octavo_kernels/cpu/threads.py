"""Thread pool with work stealing: a job is divided into shares, one for each thread; who is done takes from the others.

One caller posts a job and works on it too. It never waits for a helper that has not begun: it computes that share
itself, so on a busy machine a job takes little longer than on the threads that do run. Results do not depend on which
thread computes an item: items write to disjoint memory.

The pool is an array of int64 words. While they compute, threads write to cache lines of their own::

    JOB       number; task address, its arguments, number of items, smallest piece, number of shares. The number is
              odd while a job is being described: helpers read it before and after the rest.
    COUNT     threads     ACTIVE  of these, those that get shares     CHANGED   cycle at which ACTIVE changed
    RETURN    cycles after which one more gets shares
    WINDOW    cycle at which a period of observation began     LOST    cycles waited in vain in this period
    BUSY      1 while a job is posted       STOP     1 when the helpers should return
    SHARE     for each thread TAKEN: job number << OFFSET_BITS | items of its share that are taken, to which anyone
              advances it by compare-and-swap; COMPUTED: likewise the items that this thread has computed, which it
              alone writes; and SLEEPS: 1 while it waits in the kernel

A word of an earlier job counts as zero, so that posting a job writes no line but JOB. One of a later job tells a helper
that its job is over.

Helpers spin for a moment after their last share (the next one usually follows within microseconds), then sleep. If
another program gets the processor of a helper that is computing, all threads wait for it. Where a quarter of the time
is lost so, fewer threads stay active; they come back one by one.
"""

from __future__ import annotations

import atexit
import os
import threading
from typing import Any

import numpy as np

from octavo.system.cpus import num_hardware_threads
from octavo_kernels.cpu.compiled import compiled, inlined
from octavo_kernels.cpu.memory import (
    FUTEX_WAIT_PRIVATE,
    FUTEX_WAKE_PRIVATE,
    atomic_load,
    atomic_store,
    atomic_swap_if,
    call_task,
    cycles,
    futex,
    pause,
    publish,
    yield_processor,
)

LINE = 128
"""Bytes from one thread's words to the next: processors fetch cache lines in pairs."""
JOB, COUNT, BUSY, STOP, SHARE = (LINE * i for i in range(5))
TASK, ARGUMENTS, ITEMS, PIECE, SHARES = (8 * i for i in range(1, 6))
ACTIVE, CHANGED, RETURN, WINDOW, LOST = (COUNT + 8 * i for i in range(1, 6))
COMPUTED, SLEEPS = 8, 64
"""Offsets in a thread's line. The second is on a cache line that is only written to sleep and to wake."""
OFFSET_BITS = 24
MOST_ITEMS = (1 << OFFSET_BITS) - 1
PORTION = 2
"""A thread takes half of what is left of a share at a time: the rest is for others, should it be slow."""
PATIENCE = 20_000
"""Cycles, five to ten microseconds, after which a helper looks for shares of a short job that nobody has begun. Looking
makes the next job's first access to these shares slower."""
CYCLES_BEFORE_YIELD = 200_000
CYCLES_BEFORE_SLEEP = 1_500_000
"""About half a millisecond: longer than any gap between two kernels of a decode step."""
SPINS_BEFORE_YIELD = 200
STALLED_FOR = 200_000
"""About 0.1 ms: a job that waits for longer than that, and than it computed, waits for a thread without a processor."""
PERIOD = 1 << 27
"""About 50 ms."""
LATEST_RETURN = 1 << 34
"""About 6 s, where every return made all wait again."""


@inlined
def _line(pool: int, thread: int) -> Any:
    return pool + SHARE + LINE * thread


@inlined
def _take(taken: int, number: int, size: int, piece: int) -> Any:
    """Take items of a share of ``size``: the first and the end of them, which are equal if none is left."""
    while True:
        word = atomic_load(taken)
        begin = word & MOST_ITEMS if word >> OFFSET_BITS == number else 0
        if word >> OFFSET_BITS > number or begin >= size:
            return size, size
        end = min(size, begin + max(piece, (size - begin) // PORTION))
        if atomic_swap_if(taken, word, (number << OFFSET_BITS) | end):
            return begin, end


@compiled
def _compute_share(pool: int, me: int, owner: int, job: Any) -> None:
    """Compute what is left of a share."""
    number, task, arguments, items, piece, shares = job
    first, computed = items * owner // shares, _line(pool, me) + COMPUTED
    size = items * (owner + 1) // shares - first
    while True:
        begin, end = _take(_line(pool, owner), number, size, piece)
        if begin == end:
            return
        call_task(task, arguments, first + begin, first + end)
        before = atomic_load(computed)
        publish(computed, (before if before >> OFFSET_BITS == number else number << OFFSET_BITS) + end - begin)


@compiled
def _compute_others(pool: int, me: int, job: Any) -> None:
    """Compute what is left of the other threads' shares."""
    for distance in range(1, job[5]):
        _compute_share(pool, me, (me + distance) % job[5], job)


@compiled
def _wake(pool: int, thread: int) -> None:
    flag = _line(pool, thread) + SLEEPS
    if atomic_load(flag) == 1 and atomic_swap_if(flag, 1, 0):
        futex(flag, FUTEX_WAKE_PRIVATE, 1, 0)


@inlined
def _wake_two(pool: int, me: int, shares: int) -> None:
    """Wake two of the job's helpers, which wake two each."""
    for thread in range(2 * me + 1, min(2 * me + 3, shares)):
        _wake(pool, thread)


@inlined
def _posted(pool: int) -> Any:
    """The posted job, and whether it was read while it did not change."""
    at, number = pool + JOB, atomic_load(pool + JOB)
    task, arguments, items = atomic_load(at + TASK), atomic_load(at + ARGUMENTS), atomic_load(at + ITEMS)
    job = number, task, arguments, items, atomic_load(at + PIECE), atomic_load(at + SHARES)
    return job, number & 1 == 0 and atomic_load(at) == number


@compiled
def _help(pool: int, me: int) -> None:
    """A helper's loop: compute a share of each job, spin for more, sleep, until STOP is set."""
    last, since, may_help = 0, cycles(), False
    while atomic_load(pool + STOP) == 0:
        job, is_whole = _posted(pool)
        number, _, _, items, piece, shares = job
        if is_whole and number != last:
            last, may_help = number, me < shares
            if may_help:
                _wake_two(pool, me, shares)
                _compute_share(pool, me, me, job)
                since = cycles()
        waited = cycles() - since
        if may_help and is_whole and (items > 2 * piece * shares or waited > PATIENCE):
            may_help = False
            if atomic_load(pool + BUSY) == 1:
                _compute_others(pool, me, job)
                since = cycles()
        elif waited > CYCLES_BEFORE_SLEEP:
            _sleep(pool, me, last)
            since = cycles()
        elif waited > CYCLES_BEFORE_YIELD:
            yield_processor()
        else:
            pause()


@compiled
def _sleep(pool: int, me: int, last: int) -> None:
    """Wait in the kernel, unless a job after ``last`` has a share for this helper."""
    flag = _line(pool, me) + SLEEPS
    atomic_store(flag, 1)
    is_needed = atomic_load(pool + JOB) != last and atomic_load(pool + JOB + SHARES) > me
    if not is_needed and atomic_load(pool + STOP) == 0:
        futex(flag, FUTEX_WAIT_PRIVATE, 1, 0)
    atomic_store(flag, 0)


@compiled
def _await(pool: int, number: int, items: int, shares: int) -> None:
    """Wait until all items are computed."""
    spins = 0
    while True:
        computed = 0
        for thread in range(shares):
            word = atomic_load(_line(pool, thread) + COMPUTED)
            computed += word & MOST_ITEMS if word >> OFFSET_BITS == number else 0
        if computed == items:
            return
        spins += 1
        if spins < SPINS_BEFORE_YIELD:
            pause()
        else:
            yield_processor()


@inlined
def _adapt(pool: int, computed_for: int, waited_for: int) -> None:
    """Once a period: fewer active threads if a quarter of it was lost; one more when that was a while ago."""
    now, is_stall = cycles(), waited_for > max(STALLED_FOR, computed_for)
    period, lost = now - atomic_load(pool + WINDOW), atomic_load(pool + LOST) + (waited_for if is_stall else 0)
    if period < PERIOD:
        if is_stall:
            publish(pool + LOST, lost)
        return
    publish(pool + WINDOW, now)
    publish(pool + LOST, 0)
    active, after = atomic_load(pool + ACTIVE), atomic_load(pool + RETURN)
    if lost > period // 4:
        active, after = max(2, active - max(1, active // 4)), min(4 * after, LATEST_RETURN)
    elif active < atomic_load(pool + COUNT) and now - atomic_load(pool + CHANGED) > after:
        active, after = active + 1, max(after // 2, PERIOD)
    else:
        return
    publish(pool + ACTIVE, active)
    publish(pool + RETURN, after)
    publish(pool + CHANGED, now)


@inlined
def _post(pool: int, task: int, arguments: int, items: int, piece: int, shares: int) -> Any:
    at, number = pool + JOB, atomic_load(pool + JOB) + 2
    publish(at, number - 1)
    publish(at + TASK, task)
    publish(at + ARGUMENTS, arguments)
    publish(at + ITEMS, items)
    publish(at + PIECE, piece)
    publish(at + SHARES, shares)
    publish(at, number)
    return number, task, arguments, items, piece, shares


@inlined
def width(pool: int) -> Any:
    """The number of threads that a job may be divided among."""
    return atomic_load(pool + ACTIVE) if pool != 0 else 1


@compiled
def run(pool: int, task: int, arguments: int, items: int, piece: int) -> None:
    """Call ``task(arguments, begin, end)`` so that every item of ``range(items)`` is covered once; wait for all.

    ``piece`` items are worth giving to a thread, fewer are not. ``pool`` is ``pool_address()``; 0 means no helpers.
    When another caller is using them, this one works alone.
    """
    shares = min(width(pool), (items + piece - 1) // piece)
    if shares <= 1 or items > MOST_ITEMS or not atomic_swap_if(pool + BUSY, 0, 1):
        call_task(task, arguments, 0, items)
        return
    begun = cycles()
    job = _post(pool, task, arguments, items, piece, shares)
    _wake_two(pool, 0, shares)
    _compute_share(pool, 0, 0, job)
    _compute_others(pool, 0, job)
    waits = cycles()
    _await(pool, job[0], items, shares)
    _adapt(pool, waits - begun, cycles() - waits)
    publish(pool + BUSY, 0)


class HelperPool:
    """The helpers of this process. ``address`` is what ``run`` takes."""

    def __init__(self, num_helpers: int) -> None:
        words = np.zeros((SHARE + LINE * (num_helpers + 2)) // 8, np.int64)
        self._words = words[-words.ctypes.data % LINE // 8 :]
        self._words[COUNT // 8] = self._words[ACTIVE // 8] = num_helpers + 1
        self._words[RETURN // 8] = PERIOD
        self.address = int(self._words.ctypes.data)
        self._helpers = [
            threading.Thread(target=_help, args=(self.address, 1 + i), name=f"octavo-kernels-{i}", daemon=True)
            for i in range(num_helpers)
        ]
        for helper in self._helpers:
            helper.start()

    def stop(self) -> None:
        """Stop the helpers and wait for them; the memory that they read must outlive them."""
        _stop(self.address)
        for helper in self._helpers:
            helper.join()


@compiled
def _stop(pool: int) -> None:
    atomic_store(pool + STOP, 1)
    for thread in range(1, atomic_load(pool + COUNT)):
        _wake(pool, thread)


class Threads:
    """Number of threads that kernels use, and their helpers. A process has one: ``THREADS``.

    Helpers spin and sleep on memory of the process, and compiled code takes their address with every call.
    """

    def __init__(self) -> None:
        self._count: int | None = None
        self._pool: HelperPool | None = None
        self._lock = threading.Lock()

    def count(self) -> int:
        """Threads that a kernel uses, the caller's included; by default one for each CPU of this process."""
        if self._count is None:
            self._count = num_hardware_threads()
        return self._count

    def set_count(self, count: int) -> None:
        """Use ``count`` threads from now on. Must not be called while a kernel runs."""
        if count < 1:
            raise ValueError(f"at least one thread is needed, got {count}")
        if count != self.count():
            self.retire()
            self._count = count

    def pool_address(self) -> int:
        """The pool to pass to ``run``; helpers start with the first call that needs them. 0 on a single thread."""
        if self._pool is not None:
            return self._pool.address
        if self.count() == 1:
            return 0
        with self._lock:
            if self._pool is None:
                self._pool = HelperPool(self.count() - 1)
        return self._pool.address

    def retire(self) -> None:
        """Stop the helpers."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.stop()

    def forget(self) -> None:
        """Drop the pool in a forked child, which has the memory but not the helpers."""
        self._pool = None


THREADS = Threads()
num_threads, set_num_threads, pool_address = THREADS.count, THREADS.set_count, THREADS.pool_address
atexit.register(THREADS.retire)
os.register_at_fork(after_in_child=THREADS.forget)
