"""Classifies how an engine process ended, by its own fault or by a signal from outside, and tells whether it moves."""

from __future__ import annotations

import contextlib
import signal
from pathlib import Path

FAULT_SIGNALS = frozenset(
    {signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGSYS, signal.SIGTRAP}
)
"""Signals that a process usually causes itself."""
PROC = Path("/proc")
VMSTAT = PROC / "vmstat"


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


def time_of_process(pid: int) -> tuple[int, bool]:
    """Processor time of a process in clock ticks, and whether a signal stopped it; (0, False) if it is gone."""
    try:
        fields = (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0, False
    return int(fields[11]) + int(fields[12]), fields[0] in "Tt"


def processor_time(group: int) -> int | None:
    """What the processes of a process group have used so far, in clock ticks; ``None`` where it cannot be told.

    A process that loads uses some all the time, however long it takes. One that was stopped by a signal, or waits for a
    file of a disk that does not answer, uses none.
    """
    try:
        folders = [folder for folder in PROC.iterdir() if folder.name.isdecimal()]
    except OSError:  # there is no such folder, or no descriptor left
        return None
    total: int | None = None
    for folder in folders:
        with contextlib.suppress(OSError, IndexError):  # it has ended meanwhile
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            if int(fields[2]) == group:
                total = (total or 0) + int(fields[11]) + int(fields[12])
    return total
