"""How many threads a forward pass on the CPU should use."""

from __future__ import annotations

import os
from pathlib import Path

TOPOLOGY = Path("/sys/devices/system/cpu")


def num_threads_wanted() -> int:
    """``OMP_NUM_THREADS`` where that is set, else one for each core."""
    wanted = os.environ.get("OMP_NUM_THREADS", "")
    return int(wanted) if wanted.isdecimal() and int(wanted) else num_physical_cores()


def num_physical_cores(topology: Path = TOPOLOGY) -> int:
    """Cores that this process may run on, counting the hardware threads of one core once."""
    if not hasattr(os, "sched_getaffinity"):
        return os.cpu_count() or 1
    cores = set()
    for cpu in os.sched_getaffinity(0):
        try:
            cores.add((topology / f"cpu{cpu}" / "topology" / "thread_siblings_list").read_text().strip())
        except OSError:
            cores.add(str(cpu))
    return len(cores)
