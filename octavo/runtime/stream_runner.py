"""Runs a model on a device with a queue of its own: steps are started one ahead, and nothing waits but ``sample``.

A step goes up as one packed copy, runs as one CUDA graph (or launch by launch, when it is long enough to keep the
device busy that way), leaves each sequence's token on the device for the next step, and sends the tokens down. Steps
whose tokens the host must choose are computed by ``ModelRunner`` when their result is asked for; the steps behind
them start after that.

Shapes: T rows, S sequences, C cells, D model, V vocabulary.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from octavo import ops
from octavo.errors import RunnerError
from octavo.models.registry import CausalLM
from octavo.ops.sample import NOT_FINITE, NOTHING_LEFT, OUT_OF_RANGE
from octavo.runtime import sampler
from octavo.runtime.cells import Cells
from octavo.runtime.graphs import Graphs, graph_shapes, padded_shape
from octavo.runtime.kv_storage import KVStorage
from octavo.runtime.model_runner import ModelRunner
from octavo.runtime.step_inputs import DeviceStep, HostStep, StepShape, num_bytes, view_step
from octavo.types import Masks, Plan, Sampled

logger = logging.getLogger(__name__)

STEPS_IN_FLIGHT = 4
"""Buffers for steps: more than an engine ever has in flight."""
ERRORS = {NOT_FINITE: sampler.NOT_NUMBERS, NOTHING_LEFT: sampler.NOTHING_LEFT, OUT_OF_RANGE: sampler.OVERFLOW}
"""What ``ops.sample`` says instead of a token."""


class StepLimits(NamedTuple):
    """The most that a step can be."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_blocks: int
    """Entries of a block table."""


@dataclass(eq=False, slots=True)
class PendingStep:
    """A plan that is running on the device, or that waits until the host has chosen the tokens of one before it."""

    runner: StreamRunner
    plan: Plan
    by_host: bool
    is_started: bool = False
    num_computed: int = 0
    """Items that were not stale when it was started."""
    tokens_S: npt.NDArray[np.int32] | None = None
    """Where the tokens arrive."""
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
    ) -> None:
        device = storage.pool.device
        self._model = model
        self._layers = storage.layers
        self._block_size = storage.block_size
        self._limits = limits
        self._batch_invariant = batch_invariant
        self._by_host = ModelRunner(model, storage, vocab_size)
        self._cells = Cells(limits.max_num_seqs, limits.max_blocks)
        self._is_cuda = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if self._is_cuda else None  # type: ignore[no-untyped-call]
        self._graphs = Graphs(self._forward, _launched_early) if self._is_cuda and not enforce_eager else None
        largest, _ = padded_shape(limits.max_num_batched_tokens, limits.max_num_seqs, 2, limits.max_num_seqs)
        S, size = largest.num_seqs, num_bytes(largest, limits.max_blocks)
        self._last_tokens_C = torch.zeros(limits.max_num_seqs + 1, dtype=torch.int32, device=device)
        """By cell; the last one is that of padding."""
        self._buffer = torch.zeros(size, dtype=torch.uint8, device=device)
        self._tables_SB = torch.zeros(S, limits.max_blocks, dtype=torch.int32, device=device)
        self._uploads = [torch.zeros(size, dtype=torch.uint8, pin_memory=self._is_cuda) for _ in range(STEPS_IN_FLIGHT)]
        self._results_QS = torch.zeros(STEPS_IN_FLIGHT, S, dtype=torch.int32, pin_memory=self._is_cuda)
        """On the host, which the device writes to by itself."""
        self._host_steps: dict[tuple[int, StepShape], HostStep] = {}
        self._device_steps: dict[StepShape, DeviceStep] = {}
        self._num_started = 0
        self._waiting: deque[PendingStep] = deque()

    # ---- steps come and go

    def warm_up(self) -> None:
        """Compile the kernels and capture every graph, so that no request waits for that."""
        limits = self._limits
        longest, _ = padded_shape(limits.max_num_batched_tokens, 2, 1024, limits.max_num_seqs)
        shapes = graph_shapes(limits.max_num_seqs, limits.max_num_batched_tokens)
        with self._on_stream():
            started = time.perf_counter()
            if self._is_cuda:
                self._compile(longest, shapes)
            compiled = time.perf_counter()
            for shape in [longest, *shapes]:
                self._pack([], [], shape, self._num_started % STEPS_IN_FLIGHT)  # nothing but padding
                self._compute(shape, shape is not longest)
                if self._stream is not None:
                    self._stream.synchronize()
        logger.info("kernels: %.1f s; graphs: %.1f s", compiled - started, time.perf_counter() - compiled)

    def _compile(self, longest: StepShape, shapes: list[StepShape]) -> None:
        """Compile what these shapes launch."""
        from octavo.ops.triton.launch import compiling

        with compiling():
            self._forward(longest)
            with _launched_early() if self._graphs is not None else contextlib.nullcontext():
                for shape in shapes:
                    self._forward(shape)

    def submit(self, plan: Plan) -> PendingStep:
        """Start a plan, or let it wait behind one whose tokens the host chooses; never wait for the device."""
        by_host = any(item.drafts or self._cells.by_host[self._cells.of(item.seq)] for item in plan)
        pending = PendingStep(self, plan, by_host)
        if by_host or self._waiting:
            self._waiting.append(pending)
        else:
            self._start(pending)
        return pending

    def finish(self, pending: PendingStep, masks: Masks) -> list[Sampled]:
        """The results of a plan, which must be the oldest one; see ``PendingStep.sample``."""
        if not pending.is_started:
            assert self._waiting.popleft() is pending, "results are asked for out of order"
            return self._finish_by_host(pending, masks)
        if pending.error is not None:
            raise pending.error
        if pending.done is not None:
            pending.done.synchronize()  # raises when the device is lost; nothing can go on then
        assert pending.tokens_S is not None
        tokens = iter(pending.tokens_S[: pending.num_computed].tolist())
        everything = pending.num_computed == len(pending.plan)
        return [
            _result(item.samples, next(tokens)) if everything or not item.is_stale else Sampled([])
            for item in pending.plan
        ]

    def _finish_by_host(self, pending: PendingStep, masks: Masks) -> list[Sampled]:
        """Compute a plan from beginning to end, then start what waited for it."""
        try:
            with self._on_stream():
                results = self._by_host.submit(pending.plan).sample(masks)
                cells = {item.seq.cell: r.tokens[-1] for item, r in zip(pending.plan, results, strict=True) if r.tokens}
                if cells:
                    at, tokens = (
                        torch.tensor(list(part), device=self._last_tokens_C.device)
                        for part in (cells.keys(), cells.values())
                    )
                    self._last_tokens_C[at] = tokens.int()
            return results
        finally:
            while self._waiting and not self._waiting[0].by_host:
                self._start(self._waiting.popleft())

    # ---- a step on the device

    def _start(self, pending: PendingStep) -> None:
        pending.is_started = True
        plan = [item for item in pending.plan if not item.is_stale]
        pending.num_computed = len(plan)
        index = self._num_started % STEPS_IN_FLIGHT
        self._num_started += 1
        pending.tokens_S = self._results_QS[index].numpy()
        if not plan:
            return
        try:
            with self._on_stream():
                counts = [len(item.tokens) for item in plan]
                longest = max(counts)
                shape, has_graph = padded_shape(sum(counts), len(plan), longest, self._limits.max_num_seqs)
                self._pack(plan, counts, shape, index)
                self._compute(shape, has_graph)
                if self._is_cuda:
                    pending.done = torch.cuda.Event()  # type: ignore[no-untyped-call]
                    pending.done.record()
        except torch.OutOfMemoryError as error:
            logger.exception("a forward pass of %d sequences found no memory", len(plan))
            pending.error = RunnerError(f"the forward pass failed: {error}")

    def _pack(self, plan: Plan, counts: list[int], shape: StepShape, index: int) -> None:
        """Write a plan, of which no item is stale, into a buffer, and send it up."""
        host = self._host_steps.get((index, shape))
        if host is None:
            host = self._host_steps[index, shape] = HostStep(self._uploads[index], shape)
        cells = self._cells
        tokens: list[int | None] = []
        for item in plan:
            tokens.extend(item.tokens)
            if tokens[-1] is None:
                tokens[-1] = -1
        of_seq = np.array([cells.of(item.seq) for item in plan], dtype=np.int64)
        starts = np.array([item.start for item in plan], dtype=np.int64)
        lens = np.array(counts, dtype=np.int64)
        first_rows = np.zeros(len(plan) + 1, dtype=np.int64)
        np.cumsum(lens, out=first_rows[1:])
        positions, of_row, ends = starts, of_seq, starts + lens
        if len(tokens) > len(plan):
            seq_of_row = np.repeat(np.arange(len(plan)), lens)
            positions = np.arange(len(tokens)) - first_rows[seq_of_row] + starts[seq_of_row]
            of_row = of_seq[seq_of_row]
        blocks = cells.tables_CB[of_row, positions // self._block_size].astype(np.int64)
        width = -(-int(ends.max(initial=1)) // self._block_size)
        host.fill("token_ids", np.array(tokens, dtype=np.int64), 0)
        host.fill("positions", positions, 0)
        host.fill("slot_mapping", blocks * self._block_size + positions % self._block_size, -1)
        host.fill("cells", of_seq, self._limits.max_num_seqs)
        host.fill("seeds", cells.seeds[of_seq], 0)
        host.fill("cu_seqlens", first_rows, len(tokens))
        host.fill("seq_lens", ends, 0)
        host.fill("sample_positions", ends, 0)
        host.fill("top_k", cells.top_k[of_seq], 0)
        host.fill("temperature", cells.temperature[of_seq], 0)
        host.fill("min_p", cells.min_p[of_seq], 0)
        host.fill("top_p", cells.top_p[of_seq], 1)
        host.fill("result_row", [index], 0)
        used = host.fill_tables(cells.tables_CB[of_seq, :width])
        self._buffer[: len(used)].copy_(used, non_blocking=True)

    def _compute(self, shape: StepShape, has_graph: bool) -> None:
        if has_graph and self._graphs is not None:
            self._graphs(shape)
        else:
            self._forward(shape)

    def _forward(self, shape: StepShape) -> None:
        """Everything that the device does in a step; what differs from step to step is read there."""
        step = self._device_steps.get(shape)
        if step is None:
            step = self._device_steps[shape] = view_step(self._buffer, shape, self._tables_SB)
        rows = step.rows
        ops.stage_step(
            step.token_ids_T,
            rows.cu_seqlens_q,
            step.cells_S,
            self._last_tokens_C,
            step.packed_tables,
            step.width,
            rows.block_tables_SB,
        )
        x_TD = self._model.forward(step.token_ids_T, step.positions_T, self._layers, rows)
        x_SD = x_TD if shape.max_query_len == 1 else x_TD[(rows.cu_seqlens_q[1:] - 1).clamp(min=0)]
        tokens_S = ops.sample(self._model.logits(x_SD), step.params)
        ops.publish_tokens(tokens_S, step.cells_S, self._last_tokens_C, self._results_QS, step.result_row)

    @contextlib.contextmanager
    def _on_stream(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.inference_mode())
            if self._stream is not None:
                stack.enter_context(torch.cuda.stream(self._stream))
            if self._batch_invariant:
                stack.enter_context(_invariant())
            yield


def _result(samples: bool, token: int) -> Sampled:
    if not samples:
        return Sampled([])
    return Sampled([token]) if token >= 0 else Sampled([], error=ERRORS[token])


def _launched_early() -> contextlib.AbstractContextManager[None]:
    from octavo.ops.triton.launch import pdl  # triton is there where CUDA is, and maybe nowhere else

    return pdl()


def _invariant() -> contextlib.AbstractContextManager[None]:
    from octavo.ops.triton.launch import invariant

    return invariant()
