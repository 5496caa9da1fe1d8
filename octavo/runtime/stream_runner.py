"""Runs a model on a device with a queue of its own: steps are started one ahead, and nothing waits but ``sample``.

A step goes up as one packed copy, runs as one CUDA graph (or launch by launch, when it is long enough to keep the
device busy that way), leaves each sequence's token on the device for the next step, and sends the tokens down. Steps
whose tokens the host must choose are computed by ``ModelRunner`` when their result is asked for; the steps behind
them start after that.

Shapes: S sequences.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from octavo.errors import RunnerError
from octavo.layers.stacked_lora import StackedRows
from octavo.models.pooling import Pooling
from octavo.models.registry import CausalLM
from octavo.ops.sample import NOT_FINITE, NOTHING_LEFT, OUT_OF_RANGE
from octavo.ops.stacked_lora import NOBODY
from octavo.runtime import sampler
from octavo.runtime.block_copies import StepQueue
from octavo.runtime.cells import Cells, Tables
from octavo.runtime.forward_batch import Indices
from octavo.runtime.graphs import (
    Graphs,
    Kind,
    first_extra_shapes,
    first_shapes,
    graph_shapes,
    next_shapes,
    padded_shape,
)
from octavo.runtime.kv_storage import KVStorage
from octavo.runtime.model_runner import LAST_TOKEN, ModelRunner
from octavo.runtime.step_extras import pack_extras, read_report
from octavo.runtime.step_inputs import HostStep, StepShape, slot_mapping
from octavo.runtime.step_program import (
    STEPS_IN_FLIGHT,
    StepLimits,
    StepProgram,
    batch_invariant,
    compiled_only,
    launched_early,
)
from octavo.types import Masks, Plan, Sampled, Scheduled

logger = logging.getLogger(__name__)

NO_CELLS: Indices = np.zeros(0, dtype=np.int64)
"""A step of nothing but padding has none."""
PREPARING = "prepare"
"""Name of the thread that compiles and captures what a start did not wait for; it ends when all is there."""
COMPILING_BESIDE_STEPS = 2
"""Threads. Half of compiling is Python, and for its lock the thread that runs steps has to queue with all of them."""
IDLE_SECONDS = 0.05
"""So long after the last step, the device is taken to be idle."""
HANDOVER_SECONDS = 0.001
"""Between two captures of an idle device, for a step that has come meanwhile."""
ERRORS = {NOT_FINITE: sampler.NOT_NUMBERS, NOTHING_LEFT: sampler.NOTHING_LEFT, OUT_OF_RANGE: sampler.OVERFLOW}
"""What ``ops.sample`` says instead of a token."""


@dataclass(eq=False, slots=True)
class PendingStep:
    """A plan that is running on the device, or that waits until the host has chosen the tokens of one before it."""

    runner: StreamRunner
    plan: Plan
    by_host: bool
    is_started: bool = False
    is_computed: list[bool] = field(default_factory=list)
    """For each item, whether it was started: those that were stale then were left out."""
    tokens_S: npt.NDArray[np.int32] | None = None
    """Where the tokens arrive."""
    reports_SW: npt.NDArray[np.int32] | None = None
    """Where reports of log-probabilities arrive, when any are wanted."""
    done: torch.cuda.Event | None = None
    error: RunnerError | None = None

    def sample(self, masks: Masks) -> list[Sampled]:
        """Wait for the tokens; items that were stale at the start give an empty ``Sampled``. Raise ``RunnerError``."""
        return self.runner.finish(self, masks)


class StreamRunner:
    """The runner of CUDA devices. Results must be asked for in the order in which plans were submitted."""

    def __init__(
        self,
        model: CausalLM,
        storage: KVStorage,
        vocab_size: int,
        limits: StepLimits,
        batch_invariant: bool = False,
        enforce_eager: bool = False,
        pooling: Pooling = LAST_TOKEN,
        adapter_rows: StackedRows | None = None,
    ) -> None:
        device = storage.device
        self._make_program = partial(StepProgram, model, storage, vocab_size, limits, adapter_rows)
        self._storage, self._limits = storage, limits
        self._batch_invariant = batch_invariant
        self._by_host = ModelRunner(model, storage, vocab_size, pooling=pooling, adapter_rows=adapter_rows)
        self._adapter_rows = adapter_rows
        self._cells = Cells(limits.max_num_seqs, limits.max_blocks, storage.num_groups)
        self._program = self._make_program()
        self._is_cuda = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if self._is_cuda else None  # type: ignore[no-untyped-call]
        self._graphs = Graphs(self._program, launched_early) if self._is_cuda and not enforce_eager else None
        self._host_steps: dict[tuple[int, StepShape], HostStep] = {}
        self._has_extra_kernels = threading.Event()
        """Steps with extras wait for it, for a second or two after a start."""
        self._has_extra_kernels.set()
        self._num_unfinished = 0
        self._last_finish = 0.0
        self._lock = threading.Lock()
        """Held by whoever uses the buffers and the stream: who starts a step, or who captures a graph."""
        self._waiting: deque[PendingStep] = deque()

    @property
    def queue(self) -> StepQueue | None:
        """Where steps run; ``None`` on a CPU."""
        return None if self._stream is None else StepQueue(self._stream, self._lock)

    # ---- steps come and go

    def warm_up(self) -> None:
        """Compile kernels and capture graphs for a few shapes, which serve every step; the others follow by and by.

        While they are compiled in the background, steps are padded to the shapes that are there.
        """
        if not self._is_cuda:
            return
        limits = self._limits
        first = first_shapes(limits.max_num_seqs, limits.max_num_batched_tokens, self._adapter_rows is not None)
        self._has_extra_kernels.clear()
        started = time.perf_counter()
        with self._on_stream():
            self._compile(self._program, first)
            compiled = time.perf_counter()
            for shape in first:
                self._pack([], [], NO_CELLS, shape)
                self._compute(shape, has_graph=True)
            torch.cuda.current_stream().synchronize()
        logger.info("kernels: %.1f s; graphs: %.1f s", compiled - started, time.perf_counter() - compiled)
        threading.Thread(target=_prepare_the_rest, args=(weakref.ref(self),), name=PREPARING, daemon=True).start()

    def _compile_the_rest(self) -> list[StepShape]:
        """Compile what all other shapes launch, beside the steps that run; the shapes whose graphs are to follow."""
        limits, graphs = self._limits, self._graphs
        most = limits.max_num_seqs, limits.max_num_batched_tokens, self._adapter_rows is not None
        extra, few, shapes = first_extra_shapes(*most), next_shapes(limits.max_num_seqs), graph_shapes(*most)
        started = time.perf_counter()
        with torch.cuda.stream(torch.cuda.Stream()), self._around():  # type: ignore[no-untyped-call]
            try:
                program = self._make_program()
                self._compile(program, extra)
                if graphs is not None:
                    graphs.offer(extra)
            finally:
                self._has_extra_kernels.set()
            self._compile(program, few, COMPILING_BESIDE_STEPS)
            if graphs is not None:
                graphs.offer(few)
            self._compile(program, shapes, COMPILING_BESIDE_STEPS)
        logger.info("other kernels, in the background: %.1f s", time.perf_counter() - started)
        if graphs is None:
            return []
        graphs.allow_captures()
        return shapes

    def _capture_when_idle(self, shape: StepShape) -> None:
        while self._graphs is not None and shape not in self._graphs:
            with self._lock:
                is_idle = not self._num_unfinished and time.monotonic() - self._last_finish > IDLE_SECONDS
                if is_idle:
                    with self._on_stream():
                        self._pack([], [], NO_CELLS, shape)
                        self._compute(shape, has_graph=True)
                        torch.cuda.current_stream().synchronize()
            # Whoever waits for the lock gets it only when nobody takes it again at once.
            time.sleep(HANDOVER_SECONDS if is_idle else IDLE_SECONDS)

    def _compile(self, program: StepProgram, shapes: list[StepShape], num_threads: int | None = None) -> None:
        with compiled_only(num_threads), self._as_in_graphs():
            for shape in shapes:
                program(shape)

    def submit(self, plan: Plan) -> PendingStep:
        """Start a plan, or let it wait behind one whose tokens the host chooses; never wait for the device."""
        cells_S = self._cells.of_plan(plan)
        by_host = bool(self._cells.by_host[cells_S].any()) or any(item.drafts for item in plan)
        if self._cells.has_extras[cells_S].any():
            self._has_extra_kernels.wait()
        pending = PendingStep(self, plan, by_host)
        with self._lock:
            self._num_unfinished += 1
            if by_host or self._waiting:
                self._waiting.append(pending)
            else:
                self._start(pending, cells_S)
        return pending

    def finish(self, pending: PendingStep, masks: Masks) -> list[Sampled]:
        """The results of a plan, which must be the oldest one; see ``PendingStep.sample``."""
        try:
            return self._finish(pending, masks)
        finally:
            self._last_finish = time.monotonic()
            self._num_unfinished -= 1

    def _finish(self, pending: PendingStep, masks: Masks) -> list[Sampled]:
        if not pending.is_started:
            assert self._waiting.popleft() is pending, "results are asked for out of order"
            return self._finish_by_host(pending, masks)
        if pending.error is not None:
            raise pending.error
        if pending.done is not None:
            pending.done.synchronize()  # raises when the device is lost; nothing can go on then
        assert pending.tokens_S is not None
        tokens = pending.tokens_S[: sum(pending.is_computed)].tolist()
        reports = itertools.repeat(None) if pending.reports_SW is None else pending.reports_SW
        computed = map(_result, itertools.compress(pending.plan, pending.is_computed), tokens, reports)
        return [next(computed) if is_computed else Sampled([]) for is_computed in pending.is_computed]

    def _finish_by_host(self, pending: PendingStep, masks: Masks) -> list[Sampled]:
        """Compute a plan from beginning to end, then start what waited for it."""
        try:
            with self._on_stream(), self._as_in_graphs():
                results = self._by_host.submit(pending.plan).sample(masks)
                cells = {item.seq.cell: r.tokens[-1] for item, r in zip(pending.plan, results, strict=True) if r.tokens}
                if cells:
                    at, tokens = (
                        torch.tensor(list(part), device=self._program.last_tokens_C.device)
                        for part in (cells.keys(), cells.values())
                    )
                    self._program.last_tokens_C[at] = tokens.int()
                for item in pending.plan:
                    self._cells.forget_from(item.seq.cell, item.start)
            return results
        finally:
            while self._waiting and not self._waiting[0].by_host:
                self._start(self._waiting.popleft())

    # ---- a step on the device

    def _start(self, pending: PendingStep, cells_S: Indices | None = None) -> None:
        """Start a step, with the cells of its plan where they are known."""
        pending.is_started, plan = True, pending.plan
        pending.is_computed = [item.epoch == item.seq.epoch for item in plan]
        if cells_S is None or not all(pending.is_computed):
            plan = list(itertools.compress(plan, pending.is_computed))
            cells_S = self._cells.of_plan(plan)
        index = self._program.num_steps % STEPS_IN_FLIGHT
        pending.tokens_S = self._program.results_QS[index].numpy()
        if not plan:
            return
        try:
            with self._on_stream():
                counts = [len(item.tokens) for item in plan]
                sizes = sum(counts), len(plan), max(counts), self._limits.max_num_seqs
                has_extras = bool(self._cells.has_extras[cells_S].any())
                shape, has_graph = padded_shape(*sizes, Kind(has_extras, self._looks_for_adapters(plan, has_extras)))
                if has_graph and self._graphs is not None:
                    shape = self._graphs.fit(shape)
                self._pack(plan, counts, cells_S, shape)
                self._compute(shape, has_graph)
                if has_extras and self._cells.wants_logprobs[cells_S].any():
                    pending.reports_SW = self._program.send_reports(index, len(plan))
                if self._is_cuda:
                    pending.done = torch.cuda.Event()  # type: ignore[no-untyped-call]
                    pending.done.record()
        except torch.OutOfMemoryError as error:
            logger.exception("a forward pass of %d sequences found no memory", len(plan))
            with self._on_stream():
                self._program.start_again()
            pending.error = RunnerError(f"the forward pass failed: {error}")

    def _pack(self, plan: Plan, counts: list[int], of_seq: Indices, shape: StepShape) -> None:
        """Write a plan, of which no item is stale, where the device fetches it; ``counts`` are its rows."""
        index = self._program.num_steps % STEPS_IN_FLIGHT
        host = self._host_steps.get((index, shape))
        if host is None:
            host = self._host_steps[index, shape] = HostStep(
                self._program.uploads_QB[index], shape, self._storage.num_groups
            )
        cells = self._cells
        tokens = list(itertools.chain.from_iterable([item.tokens for item in plan]))
        # Only the last token of an item may be one that the device knows first.
        for end in itertools.accumulate(counts):
            if tokens[end - 1] is None:
                tokens[end - 1] = -1
        starts = np.array([item.start for item in plan], dtype=np.int64)
        lens = np.array(counts, dtype=np.int64)
        first_rows = np.zeros(len(plan) + 1, dtype=np.int64)
        np.cumsum(lens, out=first_rows[1:])
        positions, of_row, ends = starts, of_seq, starts + lens
        if len(tokens) > len(plan):
            seq_of_row = np.repeat(np.arange(len(plan)), lens)
            positions = np.arange(len(tokens)) - first_rows[seq_of_row] + starts[seq_of_row]
            of_row = of_seq[seq_of_row]
        width = -(-int(ends.max(initial=1)) // self._storage.block_size)
        host.fill("token_ids", np.array(tokens, dtype=np.int64), 0)
        host.fill("positions", positions, 0)
        host.fill("cells", of_seq, self._limits.max_num_seqs)
        host.fill("seeds", cells.seeds[of_seq], 0)
        host.fill("cu_seqlens", first_rows, len(tokens))
        host.fill("seq_lens", ends, 0)
        host.fill("sample_positions", ends, 0)
        host.fill("top_k", cells.top_k[of_seq], 0)
        host.fill("temperature", cells.temperature[of_seq], 0)
        host.fill("min_p", cells.min_p[of_seq], 0)
        host.fill("top_p", cells.top_p[of_seq], 1)
        for group, tables in enumerate(cells.tables):
            host.fill(slot_mapping(group), self._slots(tables, of_row, positions), -1)
        host.fill_tables(*[tables.tables_CB[of_seq, :width] for tables in cells.tables])
        if shape.has_adapters and self._adapter_rows is not None:
            places = [self._adapter_rows.places.get(item.seq.request.adapter, NOBODY) for item in plan]
            host.fill("adapters", np.repeat(np.array(places, dtype=np.int32), counts), NOBODY)
        if shape.has_extras:
            self._program.extras.tell(plan, cells, of_seq.tolist())
            pack_extras(host, plan, cells, of_seq)

    def _slots(
        self, tables: Tables, cells: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.int64]:
        block_size = self._storage.block_size
        blocks = tables.tables_CB[cells, positions // block_size].astype(np.int64)
        slots: npt.NDArray[np.int64] = blocks * block_size + positions % block_size
        return slots

    def _looks_for_adapters(self, plan: Plan, has_extras: bool) -> bool:
        """Where no row may depend on the others, all steps are of one kind: a map without adapters is rounded less."""
        if self._adapter_rows is None:
            return False
        return has_extras or self._batch_invariant or any(item.seq.request.adapter for item in plan)

    def _compute(self, shape: StepShape, has_graph: bool) -> None:
        self._program.num_steps += 1
        if has_graph and self._graphs is not None:
            self._graphs(shape)
        else:
            self._program(shape)

    @contextlib.contextmanager
    def _on_stream(self) -> Iterator[None]:
        with torch.cuda.stream(self._stream), self._around():  # no stream is no change
            yield

    def _as_in_graphs(self) -> contextlib.AbstractContextManager[None]:
        """Kernels are launched as graphs launch them, so that none has to be compiled twice."""
        return launched_early() if self._graphs is not None else contextlib.nullcontext()

    @contextlib.contextmanager
    def _around(self) -> Iterator[None]:
        with torch.inference_mode(), batch_invariant() if self._batch_invariant else contextlib.nullcontext():
            yield


def _prepare_the_rest(weak: weakref.ref[StreamRunner]) -> None:
    """Compile and capture for a runner until that is done, or nobody else has the runner any more."""
    runner = weak()
    shapes = [] if runner is None else runner._compile_the_rest()
    started = time.perf_counter()
    for shape in shapes:
        del runner
        if (runner := weak()) is None:
            return
        runner._capture_when_idle(shape)
    logger.info("other graphs, between steps: %.1f s", time.perf_counter() - started)


def _result(item: Scheduled, token: int, report_W: npt.NDArray[np.int32] | None) -> Sampled:
    if not item.samples:
        return Sampled([])
    if token < 0:
        return Sampled([], error=ERRORS[token])
    count = None if report_W is None else item.seq.request.params.logprobs
    if report_W is None or count is None:
        return Sampled([token])
    return Sampled([token], [read_report(token, report_W, count)])
