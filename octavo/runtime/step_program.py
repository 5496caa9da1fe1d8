"""Everything that a device does in a step, from the packed inputs to the tokens; nothing in it waits for the host.

Shapes: T rows, S sequences, C cells, Q steps whose results are kept, D model, V vocabulary.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

import torch

from octavo import ops
from octavo.models.registry import CausalLM
from octavo.runtime.graphs import padded_shape
from octavo.runtime.kv_storage import KVStorage
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
        return padded_shape(max(self.max_num_batched_tokens, 2), self.max_num_seqs, 2, self.max_num_seqs)[0]


class StepProgram:
    """The computation of a step over buffers of its own, which are never moved: graphs hold their addresses."""

    def __init__(self, model: CausalLM, storage: KVStorage, limits: StepLimits) -> None:
        device, largest = storage.pool.device, limits.largest()
        self._model = model
        self._layers = storage.layers
        self._tables_SB = torch.zeros(largest.num_seqs, limits.max_blocks, dtype=torch.int32, device=device)
        self._steps: dict[StepShape, DeviceStep] = {}
        self._inputs = torch.zeros(num_bytes(largest, limits.max_blocks), dtype=torch.uint8, device=device)
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

    def start_again(self) -> None:
        """Count from the beginning, after a step that failed to start."""
        torch.cuda.synchronize()
        self._counter.zero_()
        self.num_steps = 0

    def __call__(self, shape: StepShape) -> None:
        """Compute the step of this shape whose inputs have been packed."""
        step = self._steps.get(shape)
        if step is None:
            step = self._steps[shape] = view_step(self._inputs, shape, self._tables_SB)
        rows = step.rows
        ops.pull_step(self._inputs, self.uploads_QB, self._counter)
        ops.stage_step(
            step.token_ids_T,
            rows.cu_seqlens_q,
            step.cells_S,
            self.last_tokens_C,
            step.packed_tables,
            step.width,
            rows.block_tables_SB,
        )
        x_TD = self._model.forward(step.token_ids_T, step.positions_T, self._layers, rows)
        x_SD = x_TD if shape.max_query_len == 1 else x_TD[(rows.cu_seqlens_q[1:] - 1).clamp(min=0)]
        tokens_S = ops.sample(self._model.logits(x_SD), step.params)
        ops.publish_tokens(tokens_S, step.cells_S, self.last_tokens_C, self.results_QS, self._counter)


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
def compiled_only() -> Iterator[None]:
    """In this block kernels are compiled, many at a time, and not run."""
    from octavo.ops.triton.launch import compiling

    with compiling():
        yield
