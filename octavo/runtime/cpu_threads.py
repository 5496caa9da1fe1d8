"""The number of threads for a forward pass on the CPU."""

from __future__ import annotations

import os
from pathlib import Path

TOPOLOGY = Path("/sys/devices/system/cpu")


def default_num_threads() -> int:
    """``OMP_NUM_THREADS`` if it is a positive number, else one thread per physical core."""
    value = os.environ.get("OMP_NUM_THREADS", "")
    return int(value) if value.isdecimal() and int(value) else num_physical_cores()


def num_physical_cores(topology: Path = TOPOLOGY) -> int:
    """Number of physical cores that this process may run on; hardware threads of one core count once."""
    if not hasattr(os, "sched_getaffinity"):
        return os.cpu_count() or 1
    cores = set()
    for cpu in os.sched_getaffinity(0):
        try:
            cores.add((topology / f"cpu{cpu}" / "topology" / "thread_siblings_list").read_text().strip())
        except OSError:
            cores.add(str(cpu))
    return len(cores)
