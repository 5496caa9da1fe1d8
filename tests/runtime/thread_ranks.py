"""Ranks of a model as threads of this process, which share memory as processes do."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

from octavo.runtime.ranks.rank_executor import Follower, RankExecutor
from octavo.steps.messages import Executor, Message, Reply, pack, unpack
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
        self._memory = memories[0]
        for thread in self._threads:
            thread.start()

    def send(self, message: Message) -> Reply[Any]:
        for inbox in self._queues:
            inbox.put(pack(message))
        return self._own.send(message)

    def close(self) -> None:
        for inbox in self._queues:
            inbox.put(None)
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
            self._memory.abort()


def make_ranks(size: int, make: Callable[[MappedRankMemory], Executor], num_stages: int = 1) -> ThreadRanks:
    """``size`` ranks, whose executors ``make`` makes."""
    descriptor = make_memory(size, num_stages=num_stages)
    memories = [MappedRankMemory(descriptor, rank, size, num_stages) for rank in range(size)]
    os.close(descriptor)
    return ThreadRanks(memories, [make(memory) for memory in memories])
