"""The runner for generating models: sends plans to an executor as messages, in one order with all device work."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import msgspec

from octavo.cache.build_offload import identity
from octavo.cache.kv_channel import plain_memory
from octavo.cache.offload import Identity
from octavo.cache.offload_tiers import Content
from octavo.engine.protocols import TensorReceiver
from octavo.engine.runner.persistent_batch import Indices
from octavo.engine.runner.step_encoder import NO_MASKS, StepEncoder
from octavo.engine.sequence_images import encode_message
from octavo.errors import CheckpointError
from octavo.sampling_params import SamplingParams
from octavo.steps.graph_shapes import StepShape
from octavo.steps.messages import (
    Compile,
    CopySlots,
    CopyState,
    Executor,
    LoadWeights,
    Message,
    OfWeights,
    ReadChecksums,
    ReadPlaces,
    Reply,
    Sleep,
    Step,
    StepResult,
    Wake,
    WritePlaces,
)
from octavo.system.background_threads import ThreadGroup, stop_if_ending
from octavo.types import GroupBlocks, HeldState, Masks, MemoryPart, Plan, Request, Sampled, Scheduled, Sequence

SECONDS_BETWEEN_LOOKS = 0.1
"""Of a thread that waits for its turn to send."""


@dataclass(eq=False, slots=True)
class PendingStep:
    """A submitted plan."""

    runner: StepRunner
    plan: Plan
    waits_for_host: bool
    is_computed: list[bool] = field(default_factory=list)
    """For each item, whether it is in the step; items that were stale when it was sent are not."""
    reply: Reply[StepResult] | None = None
    """``None`` before the step is sent, and if all items were stale."""
    is_sent: bool = False
    encoding: Reply[None] | None = None
    """The reply of the tower that computes embeddings for the step, if there is any."""
    followers: list[Message] = field(default_factory=list)
    """Messages to send behind it, ahead of any step submitted later."""

    @property
    def is_started(self) -> bool:
        """Whether the executor computes it now or next, before ``sample`` is called."""
        return self.is_sent and self.runner.executor.runs_ahead

    def sample(self, masks: Masks) -> list[Sampled]:
        """Wait for the result; items that were stale when the step was sent give an empty ``Sampled``.

        Raises ``RunnerError``.
        """
        return self.runner.finish(self, masks)


class StepRunner:
    """Sends steps to an executor. ``sample`` must be called in the order in which plans were submitted.

    A step is sent on submission if the executor runs ahead, or has stages, and the step needs no input that is known
    only later, such as a grammar's masks. Otherwise it is sent when ``sample`` is called, and later steps follow it.
    """

    def __init__(
        self, executor: Executor, encoder: StepEncoder, has_stages: bool = False, threads: ThreadGroup | None = None
    ) -> None:
        """``has_stages``: the executor computes several steps at once, one behind the other. ``threads`` are those of
        the engine."""
        self.executor = executor
        self._sends_ahead = executor.runs_ahead or has_stages
        self.encoder = encoder
        self._waiting: deque[PendingStep] = deque()
        """Steps submitted but not sent."""
        self._sending = threading.Lock()
        """Messages come from the thread that runs steps, and from one that captures graphs while the device is idle."""
        self._num_unfinished = 0
        self._last_finish = 0.0
        self.threads = threads or ThreadGroup()
        """They do what is done beside the steps."""
        self._asleep = set[MemoryPart]()
        self.on_wake: Callable[[StepRunner], None] = lambda runner: None
        """Called with this runner when the executor is awake again and has lost its graphs."""

    def send(self, message: Message) -> Reply[Any]:
        """Send ``message`` to the executor, which executes it after all earlier ones.

        Raises ``CheckpointError`` for one about weights that sleep; others wait until all is awake.
        """
        if self._asleep and isinstance(message, OfWeights):  # of the thread that made it sleep
            if "weights" in self._asleep:
                raise CheckpointError("the weights sleep")
            return self.executor.send(message)
        with self._turn():
            return self.executor.send(message)

    def send_behind(self, message: Message) -> None:
        """Send ``message`` behind all steps submitted before, and ahead of those submitted later."""
        if self._waiting:
            self._waiting[-1].followers.append(message)
        else:
            self.send(message)

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        """Only one thread sends at a time. One that waits when what it works for ends, which may be for an executor
        that sleeps, ends as well."""
        while not self._sending.acquire(timeout=SECONDS_BETWEEN_LOOKS):
            stop_if_ending()
        try:
            yield
        finally:
            self._sending.release()

    def submit(self, plan: Plan) -> PendingStep:
        """Accept a plan, and send it if possible; never wait for the device."""
        self._num_unfinished += 1
        if not self._sends_ahead:
            pending = PendingStep(self, plan, waits_for_host=True)
            self._waiting.append(pending)
            return pending
        of_seq = self.encoder.batch.of_plan(plan)
        pending = PendingStep(self, plan, self.encoder.waits_for_host(of_seq))
        if pending.waits_for_host or self._waiting:
            self._waiting.append(pending)
        else:
            self._send_step(pending, of_seq=of_seq)
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
        """Remove ``pending`` from the queue, and drop older steps, whose results were never requested."""
        while (first := self._waiting.popleft()) is not pending:
            self._send_followers(first)
            self._num_unfinished -= 1

    def _send_those_behind(self) -> None:
        while self._sends_ahead and self._waiting and not self._waiting[0].waits_for_host:
            self._send_step(self._waiting.popleft())

    def _send_step(self, pending: PendingStep, masks: Masks = NO_MASKS, of_seq: Indices | None = None) -> None:
        """Send a step of the items that are not stale; ``of_seq`` [S] are the batch indices of all items, if known."""
        pending.is_sent, plan = True, pending.plan
        pending.is_computed = [item.epoch == item.seq.epoch for item in plan]
        if not all(pending.is_computed):
            plan, of_seq = list(itertools.compress(plan, pending.is_computed)), None
        if plan:
            if of_seq is None:
                of_seq = self.encoder.batch.of_plan(plan)
            if entries := [entry for item in plan for entry in item.encodes]:
                pending.encoding = self.send(encode_message(entries))
            pending.reply = self.send(self.encoder.encode(plan, of_seq, masks))
        self._send_followers(pending)

    def _send_followers(self, pending: PendingStep) -> None:
        for message in pending.followers:
            self.send(message)
        pending.followers.clear()

    def _results(self, pending: PendingStep) -> list[Sampled]:
        if pending.reply is None:
            return [Sampled([]) for _ in pending.plan]
        plan = list(itertools.compress(pending.plan, pending.is_computed))
        if pending.encoding is not None:
            pending.encoding.wait()
        decoded = iter(self.encoder.decode(plan, pending.reply.wait()))
        return [next(decoded) if is_computed else Sampled([]) for is_computed in pending.is_computed]

    # ---- between steps

    def send_when_idle(self, make: Callable[[], Step], idle_seconds: float) -> bool:
        """If the executor has been idle for ``idle_seconds``, run the dummy step that ``make`` returns and wait for it.

        Returns whether it was run.
        """
        with self._turn():
            is_idle = (
                not (self._num_unfinished or self.threads.is_ending)
                and time.monotonic() - self._last_finish > idle_seconds
            )
            if is_idle:
                self.executor.send(make()).wait()
        return is_idle

    def capture(self, shape: StepShape) -> Reply[StepResult]:
        """Run a padding-only step through the graph of ``shape``, which captures the graph on first use."""
        return self.send(self.encoder.encode_padding(shape))

    # ---- sleep

    def sleep(self) -> None:
        """See ``Sleeper``. All messages of other threads wait until all is awake."""
        if not self._asleep:
            self._sending.acquire()
        try:
            self.executor.send(Sleep()).wait()
            self._asleep = {"weights", "kv_cache"}
        except BaseException:
            if not self._asleep:
                self._sending.release()
            raise

    def wake(self, parts: Collection[MemoryPart]) -> None:
        """See ``Sleeper``."""
        woken, left = self._asleep.intersection(parts), set[MemoryPart]()
        try:
            self.executor.send(Wake(sorted(woken))).wait()
            left = self._asleep - woken
        finally:
            self._asleep = left
            if not left:
                self._sending.release()
        if not left:
            self.on_wake(self)


WARM_UP_TOKENS = 16
"""Enough rows to select the prefill kernels, few enough to cost nothing."""


def compute_padding(runner: StepRunner) -> None:
    """Compute a dummy prefill and decode, and compile all other kernels, so that no request waits for that.

    They write to block 0 and state 0, which are overwritten before they are read. Raises ``RunnerError``.
    """
    encoder = runner.encoder
    count = min(WARM_UP_TOKENS, encoder.max_len)
    seq = Sequence(Request(0, [0] * count, SamplingParams(), max_tokens=1))
    seq.state = HeldState(0)
    seq.groups = [GroupBlocks([0] * -(-count // encoder.block_size)) for _ in encoder.batch.tables]
    for start, tokens in ((0, (0,) * (count - 1)), (count - 1, (0,))):
        if tokens:
            runner.submit([Scheduled(seq, start, tokens, (), True, seq.epoch)]).sample({})
    runner.send(Compile([])).wait()


class BlockMessages:
    """Access to the blocks of an executor's KV storage, for offloading and copying (see ``BlockStore``)."""

    def __init__(self, runner: StepRunner, num_bytes: int, state_bytes: int = 0) -> None:
        """Sizes of a block's content, and of a recurrent state."""
        self._runner = runner
        self.allocate: Callable[[int], memoryview] = plain_memory
        """See ``BlockStore``."""
        self.num_bytes, self.state_bytes = num_bytes, state_bytes

    def read(self, blocks: list[int]) -> Callable[[], Content]:
        """Start to copy ``blocks`` out; the returned function waits for their contents, in any thread."""
        return self._runner.send(ReadPlaces("blocks", blocks)).wait

    def write(self, blocks: list[int], contents: list[Content]) -> None:
        """Write ``contents`` to ``blocks``, before any step that is sent later."""
        self._runner.send(WritePlaces("blocks", blocks, cast(list[bytes], contents)))  # any buffer can be sent

    def read_state(self, slot: int) -> Callable[[], Content]:
        """Start to copy a recurrent state out, like ``read``; its last change must be one of a step that has ended."""
        return self._runner.send(ReadPlaces("states", [slot])).wait

    def read_routes(self, blocks: list[int]) -> Callable[[], bytes]:
        """Start to copy out which experts were selected for the positions of blocks, behind the steps sent before."""
        return self._runner.send(ReadPlaces("routes", blocks)).wait

    def write_state(self, slot: int, content: Content) -> None:
        """Write ``content`` to a slot, behind all steps submitted before, and what is copied from it behind them."""
        self._runner.send_behind(WritePlaces("states", [slot], [cast(bytes, content)]))

    def copy_slots(self, group: int, source: int, target: int, num_tokens: int) -> None:
        """Copy the first ``num_tokens`` slots of ``source`` to ``target`` in one KV group, before any later step."""
        self._runner.send(CopySlots(group, source, target, num_tokens))

    def copy_state(self, source: int, target: int) -> None:
        """Copy the recurrent state of one slot to another, behind all steps submitted before."""
        self._runner.send_behind(CopyState(source, target))


class WeightMessages:
    """Changes the weights of an executor's model; ``identity`` says whose keys and values there are."""

    def __init__(
        self, runner: StepRunner, folder: Path, forms: str, receiver: TensorReceiver, role: str = "both"
    ) -> None:
        self.receiver = receiver
        self._runner, self._forms, self._role = runner, forms, role
        self._folder = folder
        self.identity = identity(folder, forms, role)

    def checksums(self) -> dict[str, str]:
        """SHA-256 of the tensors in memory, by rank and place in the model."""
        content: bytes = self._runner.send(ReadChecksums()).wait()
        found = msgspec.json.Decoder(dict[str, str]).decode_lines(content)
        return {f"tp={rank}:{name}": digest for rank, own in enumerate(found) for name, digest in own.items()}

    def load(self, folder: str, files: Iterable[str]) -> None:
        """See ``LoadWeights``."""
        self._runner.send(LoadWeights(folder, list(files))).wait()
        if folder:
            self._folder = Path(folder)
        own = f"\n{uuid.uuid4().hex}" if files else ""  # what they are is not known
        weights, forms = identity(self._folder, self._forms, self._role)
        self.identity = Identity(weights + own, forms)
