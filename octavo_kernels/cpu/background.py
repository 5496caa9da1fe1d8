"""Background work in a forked process: compiling holds locks, so a thread would block, and imports take seconds."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from collections.abc import Callable, Iterator

from numba.core.compiler_lock import global_compiler_lock

from octavo_kernels.cpu.threads import num_threads

PR_SET_PDEATHSIG = 1


@contextlib.contextmanager
def in_background(work: Callable[[], object]) -> Iterator[None]:
    """While the block runs, a forked process does ``work``, if a core is available.

    It ends with the block or with this process, whichever comes first. Its errors are not reported.
    """
    child = _fork(work) if num_threads() > 1 else None
    try:
        yield
    finally:
        if child is not None:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def _fork(work: Callable[[], object]) -> int | None:
    """The id of a process that does ``work``; ``None`` if it cannot be created."""
    parent = os.getpid()
    with contextlib.suppress(OSError), global_compiler_lock:  # no other thread may be compiling during the fork
        child = os.fork()
        if child == 0:
            _do(work, parent)
        return child
    return None


def _do(work: Callable[[], object], parent: int) -> None:
    """Never returns."""
    try:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == parent:  # else the parent ended before that call
            work()
    finally:
        os._exit(0)
