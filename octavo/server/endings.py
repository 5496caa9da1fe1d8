"""Classifies how an engine process ended: by its own fault, or by a signal from outside."""

from __future__ import annotations

import signal
from pathlib import Path

FAULT_SIGNALS = frozenset(
    {signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGSYS, signal.SIGTRAP}
)
"""Signals that a process usually causes itself."""
VMSTAT = Path("/proc/vmstat")


def num_oom_kills() -> int | None:
    """Number of out-of-memory kills by the kernel since boot; ``None`` where not reported."""
    try:
        with VMSTAT.open() as lines:
            return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), None)
    except OSError:
        return None


def is_from_outside(status: int, is_out_of_memory: bool) -> bool:
    """Whether another process ended this one by a signal, so that its requests are not the cause.

    ``status`` is ``subprocess``'s return code, negative for a signal. ``is_out_of_memory``: the kernel's out-of-memory
    killer, which sends SIGKILL too, was active meanwhile.
    """
    if status >= 0 or -status in FAULT_SIGNALS:
        return False
    return not (-status == signal.SIGKILL and is_out_of_memory)
