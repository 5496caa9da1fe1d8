"""What one rank does with a message: its part of the work, and what the ranks must agree about."""

from __future__ import annotations

import contextlib
import itertools
import zlib
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from octavo.errors import CheckpointError, RanksLost, RunnerError
from octavo.ops.device_backend import RankMemory
from octavo.runtime.replies import Done, FailedReply
from octavo.steps.messages import (
    Compile,
    EncodeImages,
    Executor,
    LoadAdapter,
    LoadWeights,
    Message,
    ReadChecksums,
    ReadPlaces,
    Reply,
    Step,
    StepResult,
    UnloadAdapter,
    WritePlaces,
)

STEPS_AHEAD = 2
"""Steps that are started on a GPU before the first of them is waited for, as many as the engine has in flight. Stages
have one each."""
LAG_AHEAD = 4
"""Steps after which results are compared where ranks run ahead of their hosts, which wait for two steps at most."""


class StepReply:
    """The reply to a step: waiting compares its result with those of the other ranks."""

    def __init__(self, reply: Reply[StepResult], compare: Callable[[StepResult], None]) -> None:
        self._reply, self._compare = reply, compare

    def wait(self) -> StepResult:
        """See ``Reply``; must be called for every step, in order. Raises ``RanksLost``, also if the step failed."""
        try:
            result = self._reply.wait()
        except RunnerError as error:
            raise RanksLost(str(error)) from error
        self._compare(result)
        return result


class RankExecutor:
    """Executes messages on one rank of a model; all ranks must get the same messages.

    A step that fails on one rank leaves the others waiting, so that a failed step ends the ranks: ``RanksLost``.
    """

    def __init__(self, executor: Executor, memory: RankMemory) -> None:
        self._executor, self._memory = executor, memory
        self._collective = memory.collective
        self.num_steps = 0
        """Steps whose results are known."""
        self._digest = 0
        self._lag = LAG_AHEAD if executor.runs_ahead else memory.num_stages

    @property
    def runs_ahead(self) -> bool:
        """See ``Executor``."""
        return self._executor.runs_ahead

    @property
    def num_ahead(self) -> int:
        """Messages after the sending of which the first of them is waited for."""
        return STEPS_AHEAD if self.runs_ahead else self._memory.num_stages - 1

    def send(self, message: Message) -> Reply[Any]:
        """See ``Executor``."""
        match message:
            case Step():
                return StepReply(self._executor.send(message), self._compare)
            case EncodeImages():
                return self._encode_images(message)
            case ReadPlaces(pool, places) if pool != "routes":  # which all ranks have
                return Done(self._gathered(self._executor.send(message).wait(), len(places)))
            case ReadChecksums():  # of more tensors on the rank that adds a bias
                content = self._executor.send(message).wait()
                longest = int(self._collective.all_gather(torch.tensor([len(content)])).max())
                return Done(self._gathered(content.ljust(longest, b"\n")))
            case WritePlaces(pool, places, contents):
                return self._executor.send(WritePlaces(pool, places, [self._own(content) for content in contents]))
            case LoadAdapter():
                return self._load_adapter(message)
            case LoadWeights():
                return self._load_weights(message)
        return self._executor.send(message)

    def _gathered(self, content: bytes, count: int = 1) -> bytes:
        """The contents of all ranks, of equal sizes: ``count`` in each, of which each is behind that of the rank
        before."""
        parts = self._collective.all_gather(torch.frombuffer(bytearray(content), dtype=torch.uint8)).numpy()
        return parts.reshape(self._collective.size, count, -1).swapaxes(0, 1).tobytes()

    def _own(self, content: bytes) -> bytes:
        """This rank's part of a content."""
        size = len(content) // self._collective.size
        return content[self._collective.rank * size :][:size]

    def _compare(self, result: StepResult) -> None:
        """Compare the results up to an earlier step with those of the other ranks. Raises ``RanksLost``.

        The others know those, because no rank finishes a step before all have begun it.
        """
        number, memory = self.num_steps, self._memory
        drafts = itertools.chain.from_iterable(result.drafts)
        numbers = np.array([*result.tokens, *result.num_accepted, *drafts], np.int32)
        self._digest = zlib.crc32(numbers.tobytes(), self._digest)
        memory.write_digest(memory.rank, number, self._digest)
        self.num_steps += 1
        if (known := number - self._lag) < 0:
            return
        for rank in memory.compared:
            if memory.digest(rank, known) != memory.digest(memory.rank, known):
                raise RanksLost(f"ranks {memory.rank} and {rank} have different results in step {known}")

    def _encode_images(self, message: EncodeImages) -> Reply[None]:
        """Every rank has the tower. Raises ``RanksLost`` if it fails: it may not on the others."""
        reply = self._executor.send(message)
        try:
            reply.wait()
        except RunnerError as error:
            raise RanksLost(str(error)) from error
        return reply

    def _load_weights(self, message: LoadWeights) -> Reply[None]:
        """Take weights on all ranks or on none. Raises ``RanksLost`` if only some can."""
        reply, is_loaded = self._executor.send(message), True
        try:
            reply.wait()
        except CheckpointError:
            is_loaded = False
        all_loaded = self._collective.all_gather(torch.tensor([is_loaded]))[:, 0]
        if all_loaded.any() and not all_loaded.all():
            raise RanksLost("some ranks alone could load weights")
        return reply

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
        return FailedReply(
            CheckpointError(error or f"{message.path}: rank {int(is_loaded.int().argmin())} cannot load it")
        )


class Follower:
    """Executes messages on every rank except rank 0. Their replies are not used: rank 0 reports failures."""

    def __init__(self, rank: RankExecutor) -> None:
        self._rank = rank
        self._replies: deque[Reply[object]] = deque()

    def execute(self, message: Message) -> None:
        """Execute the next message. Raises ``RanksLost``.

        What is compiled in the background is not waited for: that would hold up the steps of all ranks.
        """
        reply = self._rank.send(message)
        if isinstance(message, Compile) and message.in_background:
            return
        self._replies.append(reply)
        while len(self._replies) > self._rank.num_ahead:
            with contextlib.suppress(CheckpointError):
                self._replies.popleft().wait()
