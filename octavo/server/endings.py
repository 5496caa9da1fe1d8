"""How an engine process ended, and whether that is evidence against the requests it had."""

from __future__ import annotations

import signal
from pathlib import Path

FAULT_SIGNALS = frozenset(
    {signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGSYS, signal.SIGTRAP}
)
"""Signals that a process brings upon itself."""
VMSTAT = Path("/proc/vmstat")


def num_oom_kills() -> int | None:
    """Processes that the kernel has killed for want of memory since it booted; ``None`` where it does not say."""
    try:
        with VMSTAT.open() as lines:
            return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), None)
    except OSError:
        return None


def is_from_outside(status: int, is_out_of_memory: bool) -> bool:
    """Whether another process ended this one by a signal, so that its requests had no part in it.

    ``status`` is that of ``subprocess``, negative for a signal. The kernel's out-of-memory killer sends SIGKILL too:
    ``is_out_of_memory`` says that it was at work.
    """
    if status >= 0 or -status in FAULT_SIGNALS:
        return False
    return not (-status == signal.SIGKILL and is_out_of_memory)
