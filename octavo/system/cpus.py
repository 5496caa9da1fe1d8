"""What CPUs there are for this process, and threads for a forward pass on them."""

from __future__ import annotations

import contextlib
import math
import os
import platform
from pathlib import Path

TOPOLOGY = Path("/sys/devices/system/cpu")
EFFICIENCY_CORES = Path("/sys/devices/cpu_atom/cpus")
CONTROL_GROUPS = Path("/sys/fs/cgroup")


def processor_name() -> str:
    """The processor's model, or its architecture where the system does not say more."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def num_cpus() -> int:
    """Hardware threads that this process may run on, as far as the quota allows."""
    return max(1, math.ceil(min(num_hardware_threads(), cpu_quota())))


def num_hardware_threads() -> int:
    """Hardware threads that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def default_num_threads() -> int:
    """``OMP_NUM_THREADS`` if it is a positive number, else one thread per physical core, as far as the quota allows."""
    value = os.environ.get("OMP_NUM_THREADS", "")
    if value.isdecimal() and int(value):
        return int(value)
    return max(1, math.ceil(min(num_physical_cores(), cpu_quota())))


def num_physical_cores(topology: Path = TOPOLOGY, efficiency_cores: Path = EFFICIENCY_CORES) -> int:
    """Number of physical cores that this process may run on; hardware threads of one core count once.

    Where there are performance cores, efficiency cores do not count: at half the speed they would make the others wait.
    """
    if not hasattr(os, "sched_getaffinity"):
        return os.cpu_count() or 1
    cpus = os.sched_getaffinity(0)
    cores = set()
    for cpu in cpus - _listed(efficiency_cores) or cpus:
        try:
            cores.add((topology / f"cpu{cpu}" / "topology" / "thread_siblings_list").read_text().strip())
        except OSError:
            cores.add(str(cpu))
    return len(cores)


def cpu_quota(membership: Path = Path("/proc/self/cgroup"), root: Path = CONTROL_GROUPS) -> float:
    """CPUs that this process may use on average: the least limit of its control groups; infinite without one.

    More threads than that, as in a container with a limit, would all be stopped for a part of each period.
    """
    least = math.inf
    with contextlib.suppress(OSError, StopIteration):
        own = next(line[3:].strip("/\n") for line in membership.read_text().splitlines(True) if line.startswith("0::"))
        for group in (Path(own), *Path(own).parents):
            with contextlib.suppress(OSError, ValueError):
                quota, period = (root / group / "cpu.max").read_text().split()
                least = min(least, math.inf if quota == "max" else int(quota) / int(period))
    return least


def _listed(file: Path) -> set[int]:
    """The numbers in a file such as "0-3,8"; empty if there is none."""
    found: set[int] = set()
    with contextlib.suppress(OSError, ValueError):
        for part in file.read_text().strip().split(","):
            first, _, last = part.partition("-")
            found.update(range(int(first), int(last or first) + 1))
    return found
