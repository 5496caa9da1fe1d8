"""The device side of a step, from packed inputs to sampled tokens, over preallocated buffers.

Shapes: S sequences, G KV groups, B entries of a block table, C batch indices, Q steps in flight, W int32 words of a
report.
"""

from __future__ import annotations

import copy
from collections.abc import Hashable, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from octavo import ops
from octavo.layers.attention import masked_rank_rows
from octavo.layers.stacked_lora import StackedRows
from octavo.models.registry import CausalLM
from octavo.ops.attention.attention import LayerCache, PagedRows
from octavo.ops.device_backend import backend_of, is_gpu
from octavo.runtime.drafting.drafter import Drafter, Tap
from octavo.runtime.drafting.optional_acceptance import Verify
from octavo.runtime.executors.embedding_pool import EmbeddingPool
from octavo.runtime.executors.routed_experts import RoutedExperts
from octavo.runtime.executors.sampling_state import SamplingState
from octavo.runtime.executors.step_program import DeviceResults, StepProgram
from octavo.runtime.executors.step_views import StepTensors, view_step
from octavo.runtime.kv_storage import KVStorage
from octavo.runtime.sharded_logits import WHOLE, ShardedVocabulary
from octavo.steps.graph_shapes import StepShape, all_drafts
from octavo.steps.layout import num_bytes
from octavo.steps.limits import StepLimits
from octavo.steps.messages import MeasureKernels, PrepareTuning, Step, Tuning, UseKernels
from octavo.steps.reports import report_width

STEPS_IN_FLIGHT = 4
"""Number of upload and result buffers; more steps than an engine ever has in flight."""


class DeviceProgram:
    """Runs steps over buffers at fixed addresses, because CUDA graphs record addresses."""

    def __init__(
        self,
        model: CausalLM,
        storage: KVStorage,
        vocab_size: int,
        limits: StepLimits,
        adapter_rows: StackedRows | None = None,
        vocabulary: ShardedVocabulary = WHOLE,
        drafter: Drafter | None = None,
        verify: Verify | None = None,
        embeddings: EmbeddingPool | None = None,
    ) -> None:
        device, largest = storage.device, limits.largest()
        tables = storage.num_groups, largest.num_seqs, limits.max_blocks
        self._tables_GSB = torch.zeros(tables, dtype=torch.int32, device=device)
        self._steps: dict[StepShape, StepTensors] = {}
        size = num_bytes(largest, limits.max_blocks, storage.num_groups)
        size += 4 * largest.num_rows  # ``row_seqs``, which only smaller shapes have
        self._inputs = torch.zeros(size, dtype=torch.uint8, device=device)
        self.device = self._inputs.device
        self._counter = torch.zeros(1, dtype=torch.int32, device=device)
        self.num_steps = 0
        """Steps started so far; the device keeps the same count in ``_counter``."""
        pinned = is_gpu(device)
        self._uploads_QB = torch.zeros(STEPS_IN_FLIGHT, len(self._inputs), dtype=torch.uint8, pin_memory=pinned)
        """Host memory: row ``num_steps % Q`` holds the inputs of the next step; a kernel copies it to the device."""
        most = largest.num_samples + largest.num_seqs
        self._results_QN = torch.zeros(STEPS_IN_FLIGHT, most, dtype=torch.int32, pin_memory=pinned)
        """Host memory: the device writes a step's tokens, and the numbers of accepted drafts, to the row with the index
        of its upload row."""
        self._block_size, self.num_groups = storage.block_size, storage.num_groups
        max_len = limits.max_blocks * storage.block_size
        self.state = SamplingState(
            limits.max_num_seqs, max_len, largest.num_samples, vocab_size, device, limits.num_drafts, vocabulary
        )
        width = report_width(self.state.most_top)
        self._reports_RW = torch.zeros(largest.num_samples, width, dtype=torch.int32, device=device)
        """Reports of the last step, at a fixed address for graphs."""
        shape = (STEPS_IN_FLIGHT, *self._reports_RW.shape)
        self._reports_QRW = torch.zeros(shape, dtype=torch.int32, pin_memory=pinned)

        def forward(token_ids_T: torch.Tensor, positions_T: torch.Tensor, rows: PagedRows) -> torch.Tensor:
            if storage.context is not None:
                rows = rows.owned(storage.context.part)
            if storage.sequences is not None:
                rows = masked_rank_rows(rows, storage.sequences, storage.num_blocks, storage.block_size)
            return model.forward(token_ids_T, positions_T, storage.layers, rows)

        self.has_drafter = drafter is not None
        """Whether a drafter runs at the end of every step."""
        routes = RoutedExperts.of(model, storage)
        self._program = StepProgram(
            model, forward, self.state, adapter_rows, drafter, verify, embeddings=embeddings, routes=routes
        )

    def upload(self, message: Step) -> None:
        """Write a step's bytes to the next upload row, and update the sampling state from the message."""
        self.state.update(message.histories, message.lists)
        row = self._uploads_QB[self.num_steps % STEPS_IN_FLIGHT].numpy()
        row[: len(message.inputs)] = np.frombuffer(message.inputs, dtype=np.uint8)

    def start_again(self) -> None:
        """Reset the device's step counter to the host's, after a step that failed to start."""
        self._counter.fill_(self.num_steps)

    def result(self, index: int) -> npt.NDArray[np.int32]:
        """The host buffer that receives the tokens of step ``index``, then its numbers of accepted drafts, [N]."""
        found: npt.NDArray[np.int32] = self._results_QN[index % STEPS_IN_FLIGHT].numpy()
        return found

    def send_reports(self, index: int, count: int) -> npt.NDArray[np.int32]:
        """Start copying the last step's first ``count`` reports to the host; they are valid when the step is done."""
        reports_RW = self._reports_QRW[index % STEPS_IN_FLIGHT, :count]
        reports_RW.copy_(self._reports_RW[:count], non_blocking=True)
        found: npt.NDArray[np.int32] = reports_RW.numpy()
        return found

    def __call__(self, shape: StepShape) -> None:
        """Compute the uploaded step, which has this shape, entirely on the device."""
        step, computed = self.compute(shape)
        if computed.reports_RW is not None:
            self._reports_RW[: len(computed.reports_RW)].copy_(computed.reports_RW)
        self.publish(step, computed)

    def compute(self, shape: StepShape, message: Step | None = None) -> tuple[StepTensors, DeviceResults]:
        """Compute the uploaded step up to its sampled tokens; see ``StepProgram``."""
        step = self._steps.get(shape)
        if step is None:
            step = self._steps[shape] = view_step(self._inputs, shape, self._tables_GSB)
        ops.pull_step(self._inputs, self._uploads_QB, self._counter)
        self.state.stage(step, self._block_size)
        return step, self._program(step, shape, message)

    def publish(self, step: StepTensors, computed: DeviceResults) -> None:
        """Store each sequence's last token for the next step and for the host, and increment the step counter."""
        tokens_R = computed.tokens_R
        if tokens_R is None:  # nothing is sampled, so that no step continues from these
            tokens_R = torch.zeros_like(step.params.position)
        ops.publish_tokens(
            tokens_R,
            step.params.position,
            step.batch_indices_S,
            self.state.last_tokens_C,
            self.state.last_positions_C,
            self._results_QN,
            self._counter,
            computed.num_accepted_S,
            None if computed.num_accepted_S is None else step.cu_samples,
        )


class KernelTuner:
    """Measures kernels for the matrix products of the loaded model, as messages request it.

    Nothing here decides when or for how long. A measurement is a reply, and takes effect by ``UseKernels`` alone, which
    every executor of a model gets at the same place of the stream.
    """

    def __init__(self, program: DeviceProgram) -> None:
        """``program``: over buffers that no step uses; it is run once, without launching a kernel."""
        self._device = program.device
        self._backend = backend_of(program.device.type)
        shape = StepShape(1, 1, 1, has_drafter=program.has_drafter, num_proposed=all_drafts(program.has_drafter))
        self._products = self._backend.tuner(partial(program, shape), program.device)

    def execute(self, message: Tuning) -> Any:
        """See ``Executor``."""
        match message:
            case PrepareTuning(num_rows, again, seconds):
                return [] if self._products is None else self._products.prepare(num_rows, again, seconds)
            case MeasureKernels(key):
                return None if self._products is None else self._products.measure(key)
            case UseKernels(entries):
                self._backend.use_measured(entries, self._device)
                return None


Rows = tuple[int, torch.dtype]
"""Columns and type of a layer's rows."""


class _OnceOfItsKind:
    """A layer that is left out where one with the same kernels has run on rows as wide, of the same type."""

    def __init__(self, layer: Any, form: Hashable, is_first: bool, is_kept: bool, given: dict[Hashable, Rows]) -> None:
        """``given``: what each kind of layer gave in this pass, shared by all layers of the model."""
        self._layer, self._form, self._is_first, self._is_kept = layer, form, is_first, is_kept
        self._given = given

    def __call__(self, x_TD: torch.Tensor, *args: Any) -> torch.Tensor:
        if self._is_first:
            self._given.clear()
        own = x_TD.shape[1], x_TD.dtype
        rows = self._given.get((self._form, own))
        if rows is None or self._is_kept:
            found: torch.Tensor = self._layer(x_TD, *args)
            self._given[self._form, own] = found.shape[1], found.dtype
            return found
        return x_TD if rows == own else x_TD.new_empty(len(x_TD), rows[0], dtype=rows[1])

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)


def with_distinct_layers(model: CausalLM, caches: Sequence[LayerCache]) -> CausalLM:
    """``model`` without the layers that launch the same kernels as an earlier one. Only its kernels are the model's.

    Of a model without ``layers`` nothing is left out. The last layer stays, as it alone computes fewer rows.
    """
    layers = getattr(model, "layers", None)
    if not isinstance(layers, list):
        return model
    given: dict[Hashable, Rows] = {}
    kept = []
    for i, (layer, cache) in enumerate(zip(layers, caches, strict=True)):
        is_kept = i == len(layers) - 1 or isinstance(layer, Tap)
        kept.append(_OnceOfItsKind(layer, (_form(layer), cache.group), i == 0, is_kept, given))
    found = copy.copy(model)
    found.layers = kept  # type: ignore[attr-defined]
    return found


def _form(value: Any, around: tuple[int, ...] = ()) -> Hashable:
    """What kernels depend on: types, and the shapes and strides of tensors, but not their contents.

    ``around``: ids of the objects that contain it, for one that refers to those.
    """
    if isinstance(value, torch.Tensor):
        return value.dtype, value.shape, value.stride(), value.data_ptr() % 16
    if id(value) in around:
        return around.index(id(value))
    inside = (*around, id(value))
    if isinstance(value, (list, tuple)):
        return type(value), *(_form(each, inside) for each in value)
    if isinstance(value, dict):
        return tuple((name, _form(each, inside)) for name, each in value.items())
    own = getattr(value, "__dict__", None)
    if own is None or hasattr(value, "__qualname__"):  # a number, a function
        return value if isinstance(value, Hashable) else id(value)
    return type(value), _form(own, inside)
