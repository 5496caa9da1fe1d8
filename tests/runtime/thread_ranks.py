"""Ranks of a model as threads of this process, which share memory as processes do."""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import subprocess
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import pytest

from octavo import rank_process
from octavo.config import ModelSettings
from octavo.errors import RanksLost
from octavo.runtime.ranks import rank_processes
from octavo.runtime.ranks.node_link import NodeLink, NodeListener, StageRelay, join
from octavo.runtime.ranks.rank_executor import Follower, RankExecutor
from octavo.steps.messages import Executor, Message, Reply, pack, unpack
from octavo.telemetry import logs
from octavo_kernels.cpu.rank_memory import MappedRankMemory, make_memory


class ThreadRanks:
    """The executor of all ranks: every message goes to each; the answer is that of rank 0."""

    def __init__(self, memories: Sequence[MappedRankMemory], executors: Sequence[Executor]) -> None:
        pairs = zip(executors, memories, strict=True)
        self.runs_ahead = executors[0].runs_ahead
        self._own, *others = [RankExecutor(executor, memory) for executor, memory in pairs]
        self._queues: list[queue.Queue[bytes | None]] = [queue.Queue() for _ in others]
        self._threads = [
            threading.Thread(target=self._run, args=pair, daemon=True)
            for pair in zip(others, self._queues, strict=True)
        ]
        self.failures: list[Exception] = []
        self._memory, self._memories, self._num_sent = memories[0], memories, 0
        self.links: list[NodeLink] = []
        self.is_closed = False
        for thread in self._threads:
            thread.start()

    def send(self, message: Message) -> Reply[Any]:
        for number in range(self._num_sent, self._own.num_steps):  # as orders to other hosts have them
            for memory in self._memories:
                memory.write_digest(0, number, self._memory.digest(0, number))
        self._num_sent = self._own.num_steps
        for inbox in self._queues:
            inbox.put(pack(message))
        return self._own.send(message)

    def close(self) -> None:
        for inbox in self._queues:
            inbox.put(None)
        self.is_closed = True
        for link in self.links:
            link.close()
        for thread in self._threads:
            thread.join(timeout=60)
            assert not thread.is_alive()
        assert not self.failures

    def _run(self, rank: RankExecutor, inbox: queue.Queue[bytes | None]) -> None:
        try:
            follower = Follower(rank)
            while (data := inbox.get()) is not None:
                follower.execute(unpack(data))
        except Exception as error:
            self.failures.append(error)
            for memory in self._memories:
                memory.abort()


def make_ranks(
    size: int, make: Callable[[MappedRankMemory], Executor], num_stages: int = 1, num_nodes: int = 1
) -> ThreadRanks:
    """``size`` ranks, whose executors ``make`` makes. With ``num_nodes`` they share several memories, as on hosts, with
    links between these."""
    descriptors = [make_memory(size, num_stages=num_stages) for _ in range(num_nodes)]
    per_node = size // num_nodes
    memories = [
        MappedRankMemory(descriptors[rank // per_node], rank, size, num_stages, num_nodes) for rank in range(size)
    ]
    for descriptor in descriptors:
        os.close(descriptor)
    ranks = ThreadRanks(memories, [make(memory) for memory in memories])
    if num_nodes > 1:

        def check() -> None:
            if ranks.is_closed:
                raise RanksLost("the test has ended")

        down, up = connected(num_nodes)
        ranks.links = [*down, *up]
        StageRelay(memories[0], 0, {link.node: link for link in down}, check)
        for node, link in enumerate(up, 1):
            StageRelay(memories[node * per_node], node, dict.fromkeys(range(num_nodes), link), check)
    return ranks


def connected(num_nodes: int) -> tuple[list[NodeLink], list[NodeLink]]:
    """Links of the first of so many hosts to the others, and of these to the first."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = int(free.getsockname()[1])
    settings = ModelSettings(nnodes=num_nodes, node_key="a key", master_port=port)
    with ThreadPoolExecutor(1) as threads:
        down = threads.submit(NodeListener(settings).wait)
        up = [join(replace(settings, node_rank=node)) for node in range(1, num_nodes)]
        return down.result(), up


class RankThread:
    """What ``RankProcesses`` needs of ``subprocess.Popen``; the program of a rank runs in a thread of this process."""

    def __init__(self, command: Sequence[str], pass_fds: Sequence[int], **_: Any) -> None:
        self.pid = os.getpid()
        connection, memory = (os.dup(descriptor) for descriptor in pass_fds)
        self._is_over = threading.Event()
        self._socket = socket.socket(fileno=os.dup(connection))
        self._thread = threading.Thread(target=self._run, args=(Connection(connection), memory), daemon=True)
        self._thread.start()

    def _run(self, connection: Connection, memory: int) -> None:
        with contextlib.suppress(rank_process.EngineGone, EOFError, ConnectionError, RanksLost), connection:
            rank_process._run(connection, memory, self._check)
        os.close(memory)

    def _check(self) -> None:
        if self._is_over.is_set():
            raise rank_process.EngineGone

    def poll(self) -> int | None:
        return None if self._thread.is_alive() else 1

    def kill(self) -> None:
        self._is_over.set()
        with contextlib.suppress(OSError):  # the other end may be closed
            self._socket.shutdown(socket.SHUT_RDWR)  # it may wait for a message

    def wait(self) -> None:
        self._thread.join(60)
        assert not self._thread.is_alive()
        self._socket.close()


def ranks_as_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start no processes for the ranks of an engine, each of which would import torch: that they work is for
    ``tests/llm/test_ranks.py``."""
    threads = SimpleNamespace(Popen=RankThread, DEVNULL=subprocess.DEVNULL)
    monkeypatch.setattr(rank_processes, "subprocess", threads)
    monkeypatch.setattr(logs, "log_to_stderr", lambda *_: None)
