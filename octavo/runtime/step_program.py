"""Everything that a device does in a step, from the packed inputs to the tokens; nothing in it waits for the host.

Shapes: T rows, S sequences, P KV groups, B entries of a block table, C cells, Q steps whose results are kept,
W numbers of a report, D model, V vocabulary.
"""

from __future__ import annotations

import contextlib
import importlib
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from octavo import ops
from octavo.kernel_compiler import preparation
from octavo.layers.stacked_lora import StackedRows
from octavo.models.registry import CausalLM
from octavo.runtime.graphs import Kind, padded_shape
from octavo.runtime.kv_storage import KVStorage
from octavo.runtime.step_extras import ExtraTables
from octavo.runtime.step_inputs import DeviceStep, StepShape, num_bytes, view_step

STEPS_IN_FLIGHT = 4
"""Buffers for steps: more than an engine ever has in flight."""


class StepLimits(NamedTuple):
    """The most that a step can be."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_blocks: int
    """Entries of a block table."""

    def largest(self) -> StepShape:
        """A shape that no step exceeds."""
        most_rows = max(self.max_num_batched_tokens, self.max_num_seqs, 2)
        return padded_shape(most_rows, self.max_num_seqs, 2, self.max_num_seqs, Kind(True, True))[0]


class StepProgram:
    """The computation of a step over buffers of its own, which are never moved: graphs hold their addresses."""

    def __init__(
        self,
        model: CausalLM,
        storage: KVStorage,
        vocab_size: int,
        limits: StepLimits,
        adapter_rows: StackedRows | None = None,
    ) -> None:
        device, largest = storage.device, limits.largest()
        self._model = model
        self._layers = storage.layers
        self._adapter_rows = adapter_rows
        tables = storage.num_groups, largest.num_seqs, limits.max_blocks
        self._tables_PSB = torch.zeros(tables, dtype=torch.int32, device=device)
        self._steps: dict[StepShape, DeviceStep] = {}
        self._inputs = torch.zeros(
            num_bytes(largest, limits.max_blocks, storage.num_groups), dtype=torch.uint8, device=device
        )
        self._counter = torch.zeros(1, dtype=torch.int32, device=device)
        self.num_steps = 0
        """Steps that were started; the device counts them too."""
        self.last_tokens_C = torch.zeros(limits.max_num_seqs + 1, dtype=torch.int32, device=device)
        """By cell; the last one is that of padding."""
        pinned = device.type == "cuda"
        self.uploads_QB = torch.zeros(STEPS_IN_FLIGHT, len(self._inputs), dtype=torch.uint8, pin_memory=pinned)
        """On the host: row ``num_steps % Q`` is that of the next step, which the device reads by itself."""
        self.results_QS = torch.zeros(STEPS_IN_FLIGHT, largest.num_seqs, dtype=torch.int32, pin_memory=pinned)
        """On the host: the device writes the tokens of a step to the row that its inputs had."""
        max_len = limits.max_blocks * storage.block_size
        self.extras = ExtraTables(limits.max_num_seqs, max_len, largest.num_seqs, vocab_size, device)
        shape = (STEPS_IN_FLIGHT, *self.extras.reports_SW.shape)
        self._reports_QSW = torch.zeros(shape, dtype=torch.int32, pin_memory=pinned)

    def start_again(self) -> None:
        """Let the device count as the host does, after a step that failed to start."""
        self._counter.fill_(self.num_steps)

    def send_reports(self, index: int, count: int) -> npt.NDArray[np.int32]:
        """Send the last step's first ``count`` reports down; they are there when the step is done."""
        reports_SW = self._reports_QSW[index, :count]
        reports_SW.copy_(self.extras.reports_SW[:count], non_blocking=True)
        found: npt.NDArray[np.int32] = reports_SW.numpy()
        return found

    def __call__(self, shape: StepShape) -> None:
        """Compute the step of this shape whose inputs have been packed."""
        step = self._steps.get(shape)
        if step is None:
            step = self._steps[shape] = view_step(self._inputs, shape, self._tables_PSB)
        rows = step.rows
        ops.pull_step(self._inputs, self.uploads_QB, self._counter)
        for index, group in enumerate(rows.groups):
            self._stage(step, group.block_tables_SB, index * shape.num_seqs)
        if step.extras is not None:
            self.extras.remember(step, step.extras)
        last_S = None if shape.max_query_len == 1 else (rows.cu_seqlens_q[1:] - 1).clamp(min=0)
        # Adapters know the rows of a whole step.
        rows = replace(rows, logits_indices_R=last_S if step.adapters_T is None else None)
        with self._adapted(step):
            x_TD = self._model.forward(step.token_ids_T, step.positions_T, self._layers, rows)
        x_SD = x_TD if last_S is rows.logits_indices_R else x_TD[last_S]
        logits_SV = self._model.logits(x_SD)
        if step.extras is None:
            tokens_S = ops.sample(logits_SV, step.params)
        else:
            tokens_S = ops.sample(self.extras.adjust(logits_SV, step, step.extras), step.params)
            self.extras.report(logits_SV, tokens_S, step.extras)
        ops.publish_tokens(tokens_S, step.cells_S, self.last_tokens_C, self.results_QS, self._counter)

    def _stage(self, step: DeviceStep, block_tables_SB: torch.Tensor, first: int) -> None:
        ops.stage_step(
            step.token_ids_T,
            step.rows.cu_seqlens_q,
            step.cells_S,
            self.last_tokens_C,
            step.packed_tables,
            step.width,
            block_tables_SB,
            first,
        )

    def _adapted(self, step: DeviceStep) -> contextlib.AbstractContextManager[None]:
        if step.adapters_T is None:
            return contextlib.nullcontext()
        assert self._adapter_rows is not None, "the model was loaded without adapters"
        return self._adapter_rows.on_device(step.adapters_T)


def load_kernels() -> None:
    """Import the kernels in a thread, and let their compiler get ready, while weights are read."""
    preparation()
    load = threading.Thread(
        target=importlib.import_module, args=("octavo.ops.triton",), name="load kernels", daemon=True
    )
    load.start()


@contextlib.contextmanager
def launched_early() -> Iterator[None]:
    """In this block kernels are launched so that they may start before their predecessor has ended."""
    from octavo.ops.triton.launch import pdl  # triton is there where CUDA is, and maybe nowhere else

    with pdl():
        yield


@contextlib.contextmanager
def batch_invariant() -> Iterator[None]:
    """In this block a row's result depends on nothing but its sequence, to the bit."""
    from octavo.ops.triton.launch import invariant

    with invariant():
        yield


@contextlib.contextmanager
def compiled_only(num_threads: int | None = None) -> Iterator[None]:
    """In this block kernels are compiled, so many at a time, and not run."""
    from octavo.ops.triton.launch import compiling

    with compiling(num_threads):
        yield
