"""The runner of an engine: plans go to an executor as messages, in one order with all else that touches the device."""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from octavo.engine.persistent_batch import Indices
from octavo.engine.step_encoder import NO_MASKS, StepEncoder
from octavo.sampling_params import SamplingParams
from octavo.steps.messages import CopySlots, Executor, Message, ReadBlock, Reply, Step, StepResult, WriteBlock
from octavo.steps.shapes import StepShape
from octavo.types import GroupBlocks, Masks, Plan, Request, Sampled, Scheduled, Sequence


@dataclass(eq=False, slots=True)
class PendingStep:
    """A plan that was submitted."""

    runner: StepRunner
    plan: Plan
    waits_for_host: bool
    is_computed: list[bool] = field(default_factory=list)
    """For each item, whether it is in the step: those that were stale when it was sent are not."""
    reply: Reply[StepResult] | None = None
    """``None`` before the step is sent, and where nothing of the plan was left to compute."""
    is_sent: bool = False

    @property
    def is_started(self) -> bool:
        """Whether the executor computes it now, or next, although its result was not asked for."""
        return self.is_sent and self.runner.executor.runs_ahead

    def sample(self, masks: Masks) -> list[Sampled]:
        """Wait for the result; items that were stale when the step was sent give an empty ``Sampled``.

        Raise ``RunnerError``.
        """
        return self.runner.finish(self, masks)


class StepRunner:
    """Sends steps to an executor. Results must be asked for in the order in which plans were submitted.

    A step is sent at once, if the executor runs ahead and the step needs nothing that is known only later, such as a
    grammar's masks. Else it is sent when its result is asked for, and so are those that were submitted after it.
    """

    def __init__(self, executor: Executor, encoder: StepEncoder) -> None:
        self.executor = executor
        self.encoder = encoder
        self._waiting: deque[PendingStep] = deque()
        """Submitted and not sent."""
        self._sending = threading.Lock()
        """Messages come from the thread that runs steps, and from one that captures graphs while there are none."""
        self._num_unfinished = 0
        self._last_finish = 0.0

    def send(self, message: Message) -> Reply[Any]:
        """Let the executor carry out ``message`` after all that was sent before."""
        with self._sending:
            return self.executor.send(message)

    def submit(self, plan: Plan) -> PendingStep:
        """Take a plan, and send it if it may go at once; never wait for the device."""
        of_seq = self.encoder.batch.of_plan(plan)
        pending = PendingStep(self, plan, self.encoder.waits_for_host(plan, of_seq))
        self._num_unfinished += 1
        if self.executor.runs_ahead and not pending.waits_for_host and not self._waiting:
            self._send_step(pending, of_seq=of_seq)
        else:
            self._waiting.append(pending)
        return pending

    def finish(self, pending: PendingStep, masks: Masks) -> list[Sampled]:
        """The results of a plan, which must be the oldest one; see ``PendingStep.sample``."""
        try:
            if not pending.is_sent:
                self._take_from_waiting(pending)
                self._send_step(pending, masks)
            self._send_those_behind()
            return self._results(pending)
        finally:
            self._last_finish = time.monotonic()
            self._num_unfinished -= 1

    def _take_from_waiting(self, pending: PendingStep) -> None:
        """Remove the oldest step that was asked for; older ones, of which no result was asked for, are dropped."""
        while self._waiting.popleft() is not pending:
            self._num_unfinished -= 1

    def _send_those_behind(self) -> None:
        while self.executor.runs_ahead and self._waiting and not self._waiting[0].waits_for_host:
            self._send_step(self._waiting.popleft())

    def _send_step(self, pending: PendingStep, masks: Masks = NO_MASKS, of_seq: Indices | None = None) -> None:
        """Send a step of what is not stale; ``of_seq`` are the batch indices of its sequences, if they are known."""
        pending.is_sent, plan = True, pending.plan
        pending.is_computed = [item.epoch == item.seq.epoch for item in plan]
        if not all(pending.is_computed):
            plan, of_seq = list(itertools.compress(plan, pending.is_computed)), None
        if not plan:
            return
        if of_seq is None:
            of_seq = self.encoder.batch.of_plan(plan)
        pending.reply = self.send(self.encoder.encode(plan, of_seq, masks))

    def _results(self, pending: PendingStep) -> list[Sampled]:
        if pending.reply is None:
            return [Sampled([]) for _ in pending.plan]
        plan = list(itertools.compress(pending.plan, pending.is_computed))
        decoded = iter(self.encoder.decode(plan, pending.reply.wait()))
        return [next(decoded) if is_computed else Sampled([]) for is_computed in pending.is_computed]

    # ---- between steps

    def send_when_idle(self, make: Callable[[], Step], idle_seconds: float) -> bool:
        """Send a step that serves no request, and wait for it, if the executor has been idle for so long."""
        with self._sending:
            is_idle = not self._num_unfinished and time.monotonic() - self._last_finish > idle_seconds
            if is_idle:
                self.executor.send(make()).wait()
        return is_idle

    def capture(self, shape: StepShape) -> Reply[StepResult]:
        """Run padding through the graph of ``shape``, which captures it if that was not done before."""
        return self.send(self.encoder.encode_padding(shape, uses_graph=True))


WARM_UP_TOKENS = 16
"""More rows than any kernel takes for a single token, few enough to cost nothing."""


def compute_padding(runner: StepRunner) -> None:
    """Compute a chunk and a single token of no request, so that no request waits for a compiler.

    They write to block 0, whose content nothing reads before it is written again. Raises ``RunnerError``.
    """
    encoder = runner.encoder
    count = min(WARM_UP_TOKENS, encoder.max_len)
    seq = Sequence(Request(0, [0] * count, SamplingParams(), max_tokens=1))
    seq.groups = [GroupBlocks([0] * -(-count // encoder.block_size)) for _ in encoder.batch.tables]
    for start, tokens in ((0, (0,) * (count - 1)), (count - 1, (0,))):
        if tokens:
            runner.submit([Scheduled(seq, start, tokens, (), True, seq.epoch)]).sample({})


class BlockMessages:
    """Blocks of an executor's storage, for the tiers behind the prefix cache."""

    def __init__(self, runner: StepRunner, num_bytes: int) -> None:
        """``num_bytes`` of one block's content."""
        self._runner = runner
        self.num_bytes = num_bytes

    def read(self, block: int) -> Callable[[], bytes]:
        """Start to copy ``block`` out; what is returned waits for its content, in any thread."""
        reply: Reply[bytes] = self._runner.send(ReadBlock(block))
        return reply.wait

    def write(self, block: int, content: bytes) -> None:
        """Put ``content`` into ``block``, before any step that is sent from now on."""
        self._runner.send(WriteBlock(block, content))

    def copy_slots(self, group: int, source: int, target: int, num_tokens: int) -> None:
        """Copy the first positions of one block of a group to another, before any step that is sent from now on."""
        self._runner.send(CopySlots(group, source, target, num_tokens))
