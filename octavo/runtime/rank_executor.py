"""What one rank does with a message: its part of the work, and what the ranks must agree about."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import torch

from octavo.errors import CheckpointError, RanksLost, RunnerError
from octavo.runtime.rank_memory import RankMemory
from octavo.runtime.replies import Done, Failed
from octavo.steps.messages import (
    Executor,
    LoadAdapter,
    Message,
    ReadBlock,
    Reply,
    Step,
    StepResult,
    UnloadAdapter,
    WriteBlock,
)


class RankExecutor:
    """Executes messages on one rank of a model; all ranks must get the same messages.

    A step that fails on one rank leaves the others waiting, so that a failed step ends the ranks: ``RanksLost``.
    """

    runs_ahead = False

    def __init__(self, executor: Executor, memory: RankMemory) -> None:
        self._executor, self._memory = executor, memory
        self._collective = memory.collective
        self._num_steps = 0
        self._digest = 0

    def send(self, message: Message) -> Reply[Any]:
        """See ``Executor``."""
        match message:
            case Step():
                return self._step(message)
            case ReadBlock():
                content = self._executor.send(message).wait()
                parts = self._collective.all_gather(torch.frombuffer(bytearray(content), dtype=torch.uint8))
                return Done(parts.numpy().tobytes())
            case WriteBlock(block, content):
                size = len(content) // self._collective.size
                first = self._collective.rank * size
                return self._executor.send(WriteBlock(block, content[first : first + size]))
            case LoadAdapter():
                return self._load_adapter(message)
        return self._executor.send(message)

    def _step(self, message: Step) -> Reply[StepResult]:
        try:
            result: StepResult = self._executor.send(message).wait()
        except RunnerError as error:
            raise RanksLost(str(error)) from error
        self._compare(result)
        return Done(result)

    def _compare(self, result: StepResult) -> None:
        """Compare the results of the steps before this one with those of the other ranks, which have finished them.

        They have, because no rank finishes a step before all have begun it. Raises ``RanksLost``.
        """
        number, memory = self._num_steps, self._memory
        for rank in range(memory.size):
            if number and memory.digest(rank, number - 1) != self._digest:
                raise RanksLost(f"the results of ranks {memory.rank} and {rank} differ before step {number}")
        self._digest = zlib.crc32(np.array([*result.tokens, *result.num_accepted], np.int32).tobytes(), self._digest)
        self._num_steps += 1
        memory.write_digest(number, self._digest)

    def _load_adapter(self, message: LoadAdapter) -> Reply[None]:
        """Load an adapter on all ranks or on none."""
        reply, error = self._executor.send(message), ""
        try:
            reply.wait()
        except CheckpointError as found:
            error = str(found)
        is_loaded = self._collective.all_gather(torch.tensor([not error]))[:, 0]
        if is_loaded.all():
            return reply
        self._executor.send(UnloadAdapter(message.number)).wait()
        return Failed(CheckpointError(error or f"{message.path}: rank {int(is_loaded.int().argmin())} cannot load it"))
