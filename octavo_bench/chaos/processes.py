"""What the processes of a server hold, from Linux's /proc."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import NamedTuple

ENGINE = b"octavo_server.engines.engine_process"


class Held(NamedTuple):
    """What a process holds at a moment."""

    memory: int
    """Bytes of memory of its own, in RAM or swapped out: without files, which the kernel can drop."""
    descriptors: int
    sockets: int
    threads: int


def session(leader: int) -> list[int]:
    """The processes of the session that ``leader`` began, zombies left out."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            state, _, _, its_session = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[:4]
            if int(its_session) == leader and state != "Z":
                found.append(int(name))
    return found


def children(pid: int) -> list[int]:
    """The processes that ``pid`` started. Empty if it is gone."""
    with contextlib.suppress(OSError):
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def engine_of(leader: int) -> int | None:
    """The engine process of the session of ``leader``; ``None`` if there is none at the moment."""
    for pid in session(leader):
        with contextlib.suppress(OSError):
            if pid != leader and ENGINE in Path(f"/proc/{pid}/cmdline").read_bytes():
                return pid
    return None


def held(pid: int) -> Held:
    """Raises ``OSError`` if the process is gone."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    memory = sum(int(fields[name].split()[0]) << 10 for name in ("RssAnon", "VmSwap") if name in fields)
    targets = []
    for name in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile
            targets.append(os.readlink(f"/proc/{pid}/fd/{name}"))
    return Held(memory, len(targets), sum(each.startswith("socket:") for each in targets), int(fields["Threads"]))


def last_descriptor(pid: int) -> int:
    """The highest open file descriptor. Raises ``OSError`` if the process is gone."""
    return max(map(int, os.listdir(f"/proc/{pid}/fd")))
