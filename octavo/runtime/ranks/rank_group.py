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
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch

from octavo.errors import CheckpointError, ConfigError, OctavoError, RanksLost
from octavo.ops.collective import Collective
from octavo.ops.device_backend import RankMemory, SharedMemory
from octavo.runtime.memory import Limits
from octavo.runtime.ranks.rank_executor import RankExecutor
from octavo.runtime.ranks.rank_processes import RankProcesses
from octavo.runtime.ranks.ranks import OnLost
from octavo.runtime.ranks.stage_link import StageLink
from octavo.steps.messages import Executor, Message, Reply, pack
from octavo.telemetry.logs import current_format, current_level

STOPPED_SECONDS = 5.0
"""A rank that others wait for is stuck when a signal stopped it for so long."""
STALL_SECONDS = 60.0
"""And when it used no processor time for so long; it may wait for a file or for a kernel that is being compiled."""
LOOK_SECONDS = 0.5
END_SECONDS = 10.0
KINDS = {kind.__name__: kind for kind in (ConfigError, CheckpointError)}

logger = logging.getLogger(__name__)


class StartRank(msgspec.Struct, frozen=True, tag=True):
    """The first message to a rank."""

    rank: int
    size: int
    config: dict[str, Any]
    """Settings by their flat names."""
    num_stages: int
    gpus: tuple[str, ...]
    """Names of the GPUs that it sees, its own first; empty for ranks on CPUs."""
    log_level: str
    log_format: str


class RankLoaded(msgspec.Struct, frozen=True, tag=True):
    """A rank has loaded its weights."""

    free: int
    """Bytes of memory that are left."""


class RankFailed(msgspec.Struct, frozen=True, tag=True):
    """A rank cannot start."""

    kind: str
    """Name of the exception's class."""
    message: str


class RankSettled(msgspec.Struct, frozen=True, tag=True):
    """The limits for which every rank allocates memory."""

    limits: Limits


class RankReady(msgspec.Struct, frozen=True, tag=True):
    """A rank executes messages."""


StartMessage = StartRank | RankLoaded | RankFailed | RankSettled | RankReady
Expected = TypeVar("Expected", bound=StartMessage)
_decoder: msgspec.msgpack.Decoder[StartMessage] = msgspec.msgpack.Decoder(StartMessage)


def tell(connection: Connection, message: StartMessage) -> None:
    """Send a message of the start."""
    connection.send_bytes(msgspec.msgpack.encode(message))


def hear(connection: Connection, kind: type[Expected]) -> Expected:
    """Receive a message of the start. Raises ``EOFError``, or the error that the other end reports."""
    message = _decoder.decode(connection.recv_bytes())
    if isinstance(message, RankFailed):
        raise KINDS.get(message.kind, OctavoError)(message.message)
    assert isinstance(message, kind), f"expected {kind.__name__}, got {message}"
    return message


class RankGroup:
    """The ranks but the first, told what to load and watched until ``end``; see ``Ranks``."""

    def __init__(
        self,
        config: dict[str, Any],
        processes: RankProcesses,
        shared: SharedMemory,
        gpus: Sequence[str] = (),
        num_stages: int = 1,
    ) -> None:
        """Returns while the ranks load their parts of the model; ``config`` are the settings by their flat names.

        ``gpus`` are the names of the GPUs, which ranks share if there are fewer; empty for ranks on CPUs.
        """
        size = processes.size
        self.memory = shared.view(shared.make(size, processes.descriptor, num_stages), 0, size, num_stages)
        processes.close_memory()
        self._num_sharing = -(-size // max(1, len(gpus)))
        self._watch = _Watch(self.memory, processes)
        self._finalizer = weakref.finalize(self, self._watch.end)
        """Also called when this object is collected or the interpreter exits."""
        self._watch.start()
        with self._start_explained():
            for rank, connection in enumerate(processes.connections, 1):
                own_first = rank % len(gpus) if gpus else 0
                seen = (*gpus[own_first:], *gpus[:own_first])
                logs = current_level(), current_format()
                tell(connection, StartRank(rank, size, config, num_stages, seen, *logs))

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
            loaded = [hear(connection, RankLoaded) for connection in self._watch.connections]
        return min(free, *(rank.free for rank in loaded)) // self._num_sharing

    def settle(self, limits: Limits) -> None:
        """See ``Ranks``."""
        with self._start_explained():
            for connection in self._watch.connections:
                tell(connection, RankSettled(limits))

    def executor(self, own: Executor) -> RanksExecutor:
        """See ``Ranks``."""
        with self._start_explained():
            for connection in self._watch.connections:
                hear(connection, RankReady)
        return RanksExecutor(self, RankExecutor(own, self.memory))

    def report_to(self, on_lost: OnLost | None) -> None:
        """See ``Ranks``. Raises ``RanksLost`` if one has ended."""
        self._watch.on_lost = on_lost
        self.check()

    def end(self) -> None:
        """See ``Ranks``."""
        self._finalizer()

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
        self._writer.write(pack(message))
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

    def __init__(self, memory: RankMemory, ranks: RankProcesses) -> None:
        self.connections = ranks.connections
        self.lost = threading.Event()
        self.problem: RanksLost | None = None
        self.on_lost: OnLost | None = None
        self._memory, self._ranks = memory, ranks
        self._is_ending = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="octavo-ranks", daemon=True)

    def start(self) -> None:
        """Watch from now on."""
        self._thread.start()

    def check(self) -> None:
        """Raise ``RanksLost`` if a rank has ended."""
        if self.problem is not None:
            raise self.problem

    def end(self) -> None:
        """Kill the ranks."""
        self._is_ending.set()
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
            progress = StalledRankFinder(self._memory, [process.pid for process in processes])
            while not select.select(ends, [], [], LOOK_SECONDS)[0]:
                if (stuck := progress.stuck()) is not None:
                    rank, is_stopped = stuck
                    logger.error("rank %d makes no progress and is killed", rank)
                    self._lose(rank, -signal.SIGKILL if is_stopped else 1, "makes no progress")
                    break
        for rank, process in enumerate(processes, 1):
            if self.problem is None and not self._is_ending.is_set() and (status := process.poll()) is not None:
                self._lose(rank, status, f"ended ({_described(status)})")
        for process in processes:
            process.kill()

    def _lose(self, rank: int, status: int, problem: str) -> None:
        self.problem = RanksLost(f"rank {rank} of the engine {problem}")
        self._memory.abort()
        self.lost.set()
        if self.on_lost is not None and not self._is_ending.is_set():
            logger.error("%s", self.problem)
            self.on_lost(status)


class StalledRankFinder:
    """Finds a rank that others wait for and that does nothing, such as one that was stopped by a signal."""

    def __init__(self, memory: RankMemory, pids: Sequence[int]) -> None:
        self._memory, self._pids = memory, pids
        self._last: dict[int, tuple[object, float]] = {}
        """What each rank had done when it was last seen to make progress, and when that was."""

    def stuck(self) -> tuple[int, bool] | None:
        """The rank that is stuck, and whether a signal stopped it; ``None`` if there is none."""
        now = time.monotonic()
        for rank, pid in enumerate(self._pids, 1):
            progress, is_waited_for = self._memory.progress(rank)
            time_used, is_stopped = processor_time(pid)
            done = progress, time_used
            last, since = self._last.get(rank, (None, now))
            if done != last or not is_waited_for:
                self._last[rank] = done, now
            elif now - since > (STOPPED_SECONDS if is_stopped else STALL_SECONDS):
                return rank, is_stopped
        return None


def processor_time(pid: int) -> tuple[int, bool]:
    """Processor time of a process in clock ticks, and whether a signal stopped it; (0, False) if it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0, False
    return int(fields[11]) + int(fields[12]), fields[0] in "Tt"


def _described(status: int) -> str:
    return f"exit status {status}" if status >= 0 else f"killed by signal {-status}"
