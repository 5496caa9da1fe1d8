"""Compiling in forked processes at a first start: it holds locks, so a thread would block, and imports take seconds.

Before the first step they compile what takes longest; once the engine is ready, what only few requests use.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial

import torch
from numba.core.compiler_lock import global_compiler_lock

from octavo.system.background_threads import start_thread, stop_if_ending
from octavo_kernels.cpu.attention.attention import compile_attention
from octavo_kernels.cpu.attention.attention_tiles import attend_task
from octavo_kernels.cpu.attention.cached_rows import FORMATS
from octavo_kernels.cpu.compiled import RARE, is_missing, load_rare
from octavo_kernels.cpu.sampling.sample import sample_task
from octavo_kernels.cpu.threads import num_threads

PR_SET_PDEATHSIG = 1
NICENESS = 10
"""Of a process that compiles while requests are computed."""
SECONDS_BETWEEN_LOOKS = 0.1

logger = logging.getLogger(__name__)


def compiling_in_background(kv_dtype: torch.dtype) -> AbstractContextManager[None]:
    """While the block runs, other processes compile the slowest kernels, attention for caches of ``kv_dtype`` among
    them, if they are missing."""
    if kv_dtype not in FORMATS or not is_missing(attend_task):
        return contextlib.nullcontext()
    logger.info("compiling kernels for this processor, once: later starts find them. This may take a minute")
    return in_background(lambda: compile_attention(kv_dtype), sample_task)


def compile_rare() -> None:
    """Load the kernels that are used rarely. Missing ones are compiled by another process, while steps run."""
    child = _fork(load_rare, NICENESS) if num_threads() > 1 and any(map(is_missing, RARE)) else None
    if child is None:
        load_rare()
    else:
        start_thread("load kernels", _load_after, child)


def _load_after(child: int) -> None:
    """Wait for a process, and load what it compiled; without it, each kernel is compiled when it is first used."""
    try:
        while not (ended := os.waitpid(child, os.WNOHANG))[0]:
            stop_if_ending()
            time.sleep(SECONDS_BETWEEN_LOOKS)
    except ChildProcessError:  # somebody else has waited for it
        ended = child, 0
    except BaseException:
        _end(child)
        raise
    if ended[1] == 0:
        load_rare()
    else:
        logger.warning("kernels that are used rarely could not be compiled ahead (status %d)", ended[1])


@contextlib.contextmanager
def in_background(*works: Callable[[], object]) -> Iterator[None]:
    """While the block runs, forked processes do ``works``, on as many cores as there are beside this process's own.

    They end with the block or with this process, whichever comes first. Their errors are not reported.
    """
    count = min(num_threads() - 1, len(works))
    children = [_fork(partial(_do_all, works[i::count])) for i in range(count)]
    try:
        yield
    finally:
        for child in children:
            if child is not None:
                _end(child)


def _do_all(works: Sequence[Callable[[], object]]) -> None:
    for work in works:
        work()


def _end(child: int) -> None:
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def _fork(work: Callable[[], object], niceness: int = 0) -> int | None:
    """The id of a process that does ``work``; ``None`` if it cannot be created."""
    if sys.platform != "linux":  # macOS' own libraries may not be used in a fork
        return None
    parent = os.getpid()
    with contextlib.suppress(OSError), global_compiler_lock:  # no other thread may be compiling during the fork
        child = os.fork()
        if child == 0:
            _do(work, parent, niceness)
        return child
    return None


def _do(work: Callable[[], object], parent: int, niceness: int) -> None:
    """Never returns; the exit status is 0 if the work was done."""
    status = 1
    try:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == parent:  # else the parent ended before that call
            os.nice(niceness)
            work()
            status = 0
    finally:
        os._exit(status)
