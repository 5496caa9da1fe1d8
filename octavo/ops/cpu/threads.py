"""Thread pool for kernels: a job is split into chunks, and each idle thread takes the next one.

One caller posts a job and works on it too; it never waits for a helper that has not taken a chunk, so on a busy
machine a job takes no longer than on one thread. Results do not depend on which thread computes a chunk: chunks write
to disjoint memory.

The pool is an array of int64 words, each on a cache line of its own::

    CLAIM   job number << 32 | next chunk to take; a helper takes one by compare-and-swap. While a job is
            being described, "next" is CLOSED, beyond any chunk. A description only changes after all chunks of the
            previous job are done, so a successful swap proves that the description read is that job's.
    DONE    chunks finished
    JOB     task address, its arguments, number of items, items in a chunk
    ASLEEP  helpers waiting in the kernel      WAKE   a word that grows when they should look again
    BUSY    1 while a job is posted            STOP   1 when the helpers should return

Helpers spin for a moment after a job (the next one usually follows within microseconds), then sleep.
"""

from __future__ import annotations

import atexit
import os
import threading

import numpy as np

from octavo.ops.cpu.compiled import compiled
from octavo.ops.cpu.memory import (
    FUTEX_WAIT_PRIVATE,
    FUTEX_WAKE_PRIVATE,
    atomic_add,
    atomic_load,
    atomic_store,
    atomic_swap_if,
    call_task,
    futex,
    pause,
    yield_processor,
)

LINE = 64
CLAIM, DONE, JOB, ASLEEP, WAKE, BUSY, STOP, END = (LINE * i for i in range(8))
NEXT_CHUNK_BITS = 32
CLOSED = (1 << NEXT_CHUNK_BITS) - 1
EVERYONE = (1 << 31) - 1
SPINS_BEFORE_SLEEP = 8000
"""Pauses of about 50 ns each: 0.4 ms, longer than any gap between two kernels of a decode step."""
SPINS_BEFORE_YIELD = 200


@compiled
def _take_chunk(pool: int) -> bool:
    """Compute one chunk of the posted job; False when none is left."""
    claim = atomic_load(pool + CLAIM)
    task, arguments = atomic_load(pool + JOB), atomic_load(pool + JOB + 8)
    items, chunk_items = atomic_load(pool + JOB + 16), atomic_load(pool + JOB + 24)
    chunk = claim & CLOSED
    begin = chunk * chunk_items  # of any chunk that is not CLOSED; while that stands, the four may not go together
    if chunk == CLOSED or begin >= items:
        moved_on: bool = atomic_load(pool + CLAIM) != claim
        return moved_on
    if atomic_swap_if(pool + CLAIM, claim, claim + 1):
        call_task(task, arguments, begin, min(begin + chunk_items, items))
        atomic_add(pool + DONE, 1)
    return True


@compiled
def _help(pool: int) -> None:
    """A helper's loop: take chunks, spin for more, sleep, until STOP is set."""
    while atomic_load(pool + STOP) == 0:
        wake = atomic_load(pool + WAKE)
        spins = 0
        while spins < SPINS_BEFORE_SLEEP:
            if _take_chunk(pool):
                spins = 0
            else:
                pause()
                spins += 1
        atomic_add(pool + ASLEEP, 1)
        if atomic_load(pool + WAKE) == wake:
            futex(pool + WAKE, FUTEX_WAIT_PRIVATE, wake, 0)
        atomic_add(pool + ASLEEP, -1)


@compiled
def run(pool: int, task: int, arguments: int, items: int, chunk_items: int) -> None:
    """Call ``task(arguments, begin, end)`` so that every item of ``range(items)`` is covered once; wait for all.

    ``pool`` is ``pool_address()``; 0 means no helpers. When another caller is using them, this one works alone.
    """
    if pool == 0 or items <= chunk_items or not atomic_swap_if(pool + BUSY, 0, 1):
        call_task(task, arguments, 0, items)
        return
    job = ((atomic_load(pool + CLAIM) >> NEXT_CHUNK_BITS) + 1) << NEXT_CHUNK_BITS
    atomic_store(pool + CLAIM, job | CLOSED)
    atomic_store(pool + DONE, 0)
    atomic_store(pool + JOB, task)
    atomic_store(pool + JOB + 8, arguments)
    atomic_store(pool + JOB + 16, items)
    atomic_store(pool + JOB + 24, chunk_items)
    atomic_store(pool + CLAIM, job)
    atomic_add(pool + WAKE, 1)
    if atomic_load(pool + ASLEEP) > 0:
        futex(pool + WAKE, FUTEX_WAKE_PRIVATE, EVERYONE, 0)
    while _take_chunk(pool):
        pass
    spins = 0
    while atomic_load(pool + DONE) * chunk_items < items:
        spins += 1
        if spins < SPINS_BEFORE_YIELD:
            pause()
        else:
            yield_processor()
    atomic_store(pool + BUSY, 0)


class Pool:
    """The helpers of this process. ``address`` is what ``run`` takes."""

    def __init__(self, num_helpers: int) -> None:
        words = np.zeros((END + LINE) // 8, np.int64)
        start = -words.ctypes.data % LINE // 8
        self._words = words[start:]
        self.address = int(self._words.ctypes.data)
        self._helpers = [
            threading.Thread(target=_help, args=(self.address,), name=f"octavo-kernels-{i}", daemon=True)
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
    atomic_add(pool + WAKE, 1)
    futex(pool + WAKE, FUTEX_WAKE_PRIVATE, EVERYONE, 0)


class Threads:
    """Number of threads that kernels use, and their helpers. A process has one: ``THREADS``.

    Helpers spin and sleep on memory of the process, and compiled code takes their address with every call.
    """

    def __init__(self) -> None:
        self._count: int | None = None
        self._pool: Pool | None = None
        self._lock = threading.Lock()

    def count(self) -> int:
        """Threads that a kernel uses, the caller's included; by default one for each CPU of this process."""
        if self._count is None:
            self._count = len(os.sched_getaffinity(0))
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
                self._pool = Pool(self.count() - 1)
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
