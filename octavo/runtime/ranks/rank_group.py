"""The processes of a tensor-parallel engine: rank 0 is the engine process, which watches the others.

A thread watches the ranks as long as the engine lives. When a rank ends or makes no progress, all collectives are
aborted, so that no other waits for it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import sys
import threading
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from octavo.errors import RanksLost
from octavo.ops.collective import Collective
from octavo.ops.device_backend import RankMemory, SharedMemory
from octavo.runtime.memory_budget import Limits
from octavo.runtime.ranks.node_link import START_LOOK_SECONDS, NodeLink, Order, StageRelay
from octavo.runtime.ranks.rank_executor import RankExecutor
from octavo.runtime.ranks.rank_processes import RankProcesses
from octavo.runtime.ranks.ranks import OnLost
from octavo.runtime.ranks.stage_link import StageLink
from octavo.runtime.ranks.start_messages import RankLayout, RankLoaded, RankReady, RankSettled, StartRank, hear, tell
from octavo.steps.messages import Executor, Message, Reply, pack
from octavo.system.process_exit import time_of_process
from octavo.telemetry.logs import current_format, current_level

STOPPED_SECONDS = 5.0
"""A rank that others wait for is stuck when a signal stopped it for so long."""
STALL_SECONDS = 60.0
"""And when it used no processor time for so long; it may wait for a file or for a kernel that is being compiled."""
LOOK_SECONDS = 0.5
END_SECONDS = 10.0

logger = logging.getLogger(__name__)


class RankGroup:
    """The processes of an engine's ranks on this host, told what to load and watched until ``end``; see ``Ranks``."""

    def __init__(
        self,
        config: dict[str, Any],
        processes: RankProcesses,
        shared: SharedMemory,
        layout: RankLayout,
        gpus: Sequence[str] = (),
        nodes: Sequence[NodeLink] = (),
    ) -> None:
        """Returns while the ranks load their parts of the model; ``config`` are the settings by their flat names.

        ``gpus`` are the names of the GPUs, which ranks share if there are fewer; empty for ranks on CPUs. ``nodes``: on
        the first host the others, which load theirs meanwhile, on another host the first.
        """
        size, ranks = layout.size, layout.others
        descriptor = shared.make(size, processes.descriptor, layout.num_stages)
        first = min(ranks, default=0) if layout.node else 0
        self.memory = shared.view(descriptor, first, size, layout.num_stages, layout.num_nodes)
        processes.close_memory()
        self._nodes = nodes if layout.node == 0 else ()
        self._num_ordered = 0
        self._num_sharing = -(-(size // layout.num_nodes) // max(1, len(gpus)))
        self._watch = _Watch(self.memory, processes, ranks, nodes)
        self._finalizer = weakref.finalize(self, self._watch.end)
        """Also called when this object is collected or the interpreter exits."""
        self._watch.start()
        links = dict.fromkeys(range(layout.num_nodes), nodes[0]) if layout.node else {link.node: link for link in nodes}
        StageRelay(self.memory, layout.node, links, self._watch.check_running)
        with self._start_explained():
            for rank, connection in zip(ranks, processes.connections, strict=True):
                own_first = rank % len(gpus) if gpus else 0
                seen = (*gpus[own_first:], *gpus[:own_first])
                tell(connection, StartRank(rank, layout, config, seen, current_level(), current_format()))

    @property
    def collective(self) -> Collective:
        """See ``Ranks``."""
        return self.memory.within

    def link(self, dtype: torch.dtype, width: int) -> StageLink | None:
        """See ``Ranks``."""
        return None if self.memory.num_stages == 1 else StageLink(self.memory, self.check, dtype, width)

    def least_free(self, free: int) -> int:
        """See ``Ranks``. Raises the error of a rank, or ``RanksLost``."""
        with self._start_explained():
            loaded = [hear(connection, RankLoaded).free for connection in self._watch.connections]
        own = min(free, *loaded, sys.maxsize) // self._num_sharing
        return min(
            own, *(link.hear(RankLoaded, START_LOOK_SECONDS, self.check).free for link in self._nodes), sys.maxsize
        )

    def settle(self, limits: Limits) -> None:
        """See ``Ranks``."""
        with self._start_explained():
            for connection in self._watch.connections:
                tell(connection, RankSettled(limits))
        for link in self._nodes:
            link.tell(RankSettled(limits))

    def wait(self) -> None:
        """Wait until all are ready."""
        with self._start_explained():
            for connection in self._watch.connections:
                hear(connection, RankReady)
        for link in self._nodes:
            link.hear(RankReady, START_LOOK_SECONDS, self.check)

    def executor(self, own: Executor) -> RanksExecutor:
        """See ``Ranks``."""
        self.wait()
        return RanksExecutor(self, RankExecutor(own, self.memory))

    def order(self, message: bytes, num_steps: int) -> None:
        """Have the ranks of other hosts execute a message; the results of so many steps are known here.

        The last host first: what the others compute for it must not be there before the message.
        """
        if not self._nodes:
            return
        digests = [(number, self.memory.digest(0, number)) for number in range(self._num_ordered, num_steps)]
        self._num_ordered = num_steps
        for link in reversed(self._nodes):
            link.tell(Order(message, digests))

    def report_to(self, on_lost: OnLost | None) -> None:
        """See ``Ranks``. Raises ``RanksLost`` if one has ended."""
        self._watch.on_lost = on_lost
        self.check()

    def end(self) -> None:
        """See ``Ranks``."""
        self._finalizer()

    @property
    def problem(self) -> RanksLost | None:
        """What has happened to a rank, if anything."""
        return self._watch.problem

    def check(self) -> None:
        """Raise ``RanksLost`` if a rank has ended."""
        self._watch.check()

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """Raise why a rank ended, if one did, in place of the ``RanksLost`` of an exchange with it."""
        try:
            yield
        except RanksLost:
            self._watch.lost.wait(LOOK_SECONDS)  # it may be found out a little later
            self.check()
            raise

    @contextlib.contextmanager
    def _start_explained(self) -> Iterator[None]:
        """Raise ``RanksLost`` in place of the error of a connection whose rank has ended."""
        try:
            yield
        except (EOFError, OSError):
            self._watch.lost.wait(END_SECONDS)
            self.check()
            raise RanksLost("a rank closed its connection while it was started") from None


class RanksExecutor:
    """The executor of a model that is divided among ranks. Replies are those of rank 0."""

    def __init__(self, group: RankGroup, own: RankExecutor) -> None:
        self._group, self._own = group, own
        self._writer = group.memory.writer(group.check)

    @property
    def runs_ahead(self) -> bool:
        """See ``Executor``."""
        return self._own.runs_ahead

    def send(self, message: Message) -> Reply[Any]:
        """See ``Executor``; raises ``RanksLost`` when a rank is gone or stuck."""
        self._group.check()
        packed = pack(message)
        self._group.order(packed, self._own.num_steps)
        self._writer.write(packed)
        with self._group.explained():
            return ExplainedReply(self._own.send(message), self._group)


class ExplainedReply:
    """A reply of rank 0, whose failure another rank may have caused."""

    def __init__(self, reply: Reply[Any], group: RankGroup) -> None:
        self._reply, self._group = reply, group

    def wait(self) -> Any:
        """See ``Reply``; raises ``RanksLost``."""
        with self._group.explained():
            return self._reply.wait()


class _Watch:
    """The thread that watches the ranks; it holds no reference to the group."""

    def __init__(
        self, memory: RankMemory, processes: RankProcesses, ranks: Sequence[int], nodes: Sequence[NodeLink]
    ) -> None:
        self.connections = processes.connections
        self.lost = threading.Event()
        self.problem: RanksLost | None = None
        self.on_lost: OnLost | None = None
        self._memory, self._ranks, self._numbers, self._nodes = memory, processes, ranks, nodes
        self._is_ending = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="octavo-ranks", daemon=True)
        for link in nodes:
            link.on_lost = self.lose

    def start(self) -> None:
        """Watch from now on."""
        self._thread.start()

    def check(self) -> None:
        """Raise ``RanksLost`` if a rank has ended, or the error for which another host could not start."""
        if self.problem is not None:
            raise next((link.failure for link in self._nodes if link.failure is not None), self.problem)

    def check_running(self) -> None:
        """Raise ``RanksLost`` if a rank or the group has ended."""
        self.check()
        if self._is_ending.is_set():
            raise RanksLost("the engine has ended")

    def end(self) -> None:
        """Kill the ranks, and end the links."""
        self._is_ending.set()
        for link in self._nodes:
            link.close()
        for process in self._ranks.processes:
            process.kill()
        self._thread.join()
        self._ranks.end()

    def _watch(self) -> None:
        """Return when a rank has ended or the group is closed; no rank is left then."""
        processes = self._ranks.processes
        with contextlib.ExitStack() as descriptors:
            ends = [os.pidfd_open(process.pid) for process in processes]
            for end in ends:
                descriptors.callback(os.close, end)
            pids = dict(zip(self._numbers, (process.pid for process in processes), strict=True))
            progress = StalledRankFinder(self._memory, pids)
            while not select.select(ends, [], [], LOOK_SECONDS)[0]:
                if self.problem is not None or self._is_ending.is_set():
                    break
                if (stuck := progress.stuck()) is not None:
                    rank, is_stopped = stuck
                    logger.error("rank %d makes no progress and is killed", rank)
                    self.lose(f"rank {rank} makes no progress", -signal.SIGKILL if is_stopped else 1)
                    break
        for rank, process in zip(self._numbers, processes, strict=True):
            if self.problem is None and not self._is_ending.is_set() and (status := process.poll()) is not None:
                self.lose(f"rank {rank} of the engine ended ({_described(status)})", status)
        for process in processes:
            process.kill()

    def lose(self, problem: str, status: int) -> None:
        """Have all that wait for a rank fail, as it has ended with this status."""
        self.problem = RanksLost(problem)
        self._memory.abort()
        self.lost.set()
        if self.on_lost is not None and not self._is_ending.is_set():
            logger.error("%s", self.problem)
            self.on_lost(status)


class StalledRankFinder:
    """Finds a rank that others wait for and that does nothing, such as one that was stopped by a signal."""

    def __init__(self, memory: RankMemory, pids: Mapping[int, int]) -> None:
        """``pids`` of the ranks."""
        self._memory, self._pids = memory, pids
        self._last: dict[int, tuple[object, float]] = {}
        """What each rank had done when it was last seen to make progress, and seconds since then."""
        self._looked = time.monotonic()

    def stuck(self) -> tuple[int, bool] | None:
        """The rank that is stuck, and whether a signal stopped it; ``None`` if there is none."""
        before, self._looked = self._looked, time.monotonic()
        # After a longer time this process stood still, and perhaps the ranks with it.
        seconds = min(self._looked - before, 2 * LOOK_SECONDS)
        for rank, pid in self._pids.items():
            progress, is_waited_for = self._memory.progress(rank)
            time_used, is_stopped = time_of_process(pid)
            done = progress, time_used
            last, idle_seconds = self._last.get(rank, (None, 0.0))
            idle_seconds = idle_seconds + seconds if done == last and is_waited_for else 0.0
            self._last[rank] = done, idle_seconds
            if idle_seconds > (STOPPED_SECONDS if is_stopped else STALL_SECONDS):
                return rank, is_stopped
        return None


def _described(status: int) -> str:
    return f"exit status {status}" if status >= 0 else f"killed by signal {-status}"
