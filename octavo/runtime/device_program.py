"""Everything that a device does in a step, from the packed inputs to the tokens, over buffers of its own.

Shapes: S sequences, G groups, B entries of a block table, C batch indices, Q steps whose results are kept, W numbers of
a report.
"""

from __future__ import annotations

import contextlib
import importlib
import threading
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch

from octavo import ops
from octavo.kernel_compiler import preparation
from octavo.layers.stacked_lora import StackedRows
from octavo.models.registry import CausalLM
from octavo.ops.attention import PagedRows
from octavo.runtime.kv_storage import KVStorage
from octavo.runtime.sampling_state import SamplingState
from octavo.runtime.step_program import Computed, StepProgram
from octavo.runtime.step_views import StepTensors, view_step
from octavo.steps.layout import num_bytes
from octavo.steps.limits import StepLimits
from octavo.steps.messages import Step
from octavo.steps.reports import report_width
from octavo.steps.shapes import StepShape

STEPS_IN_FLIGHT = 4
"""Buffers for steps: more than an engine ever has in flight."""


class DeviceProgram:
    """Steps over buffers that are never moved: graphs hold their addresses."""

    def __init__(
        self,
        model: CausalLM,
        storage: KVStorage,
        vocab_size: int,
        limits: StepLimits,
        adapter_rows: StackedRows | None = None,
    ) -> None:
        device, largest = storage.device, limits.largest()
        tables = storage.num_groups, largest.num_seqs, limits.max_blocks
        self._tables_GSB = torch.zeros(tables, dtype=torch.int32, device=device)
        self._steps: dict[StepShape, StepTensors] = {}
        size = num_bytes(largest, limits.max_blocks, storage.num_groups)
        self._inputs = torch.zeros(size, dtype=torch.uint8, device=device)
        self._counter = torch.zeros(1, dtype=torch.int32, device=device)
        self.num_steps = 0
        """Steps that were started; the device counts them too."""
        pinned = device.type == "cuda"
        self._uploads_QB = torch.zeros(STEPS_IN_FLIGHT, len(self._inputs), dtype=torch.uint8, pin_memory=pinned)
        """On the host: row ``num_steps % Q`` is that of the next step, which the device reads by itself."""
        self._results_QS = torch.zeros(STEPS_IN_FLIGHT, largest.num_seqs, dtype=torch.int32, pin_memory=pinned)
        """On the host: the device writes the tokens of a step to the row that its inputs had."""
        max_len = limits.max_blocks * storage.block_size
        self.state = SamplingState(limits.max_num_seqs, max_len, largest.num_seqs, vocab_size, device)
        width = report_width(self.state.most_top)
        self._reports_SW = torch.zeros(largest.num_seqs, width, dtype=torch.int32, device=device)
        """Where graphs leave the reports of the last step."""
        shape = (STEPS_IN_FLIGHT, *self._reports_SW.shape)
        self._reports_QSW = torch.zeros(shape, dtype=torch.int32, pin_memory=pinned)

        def forward(token_ids_T: torch.Tensor, positions_T: torch.Tensor, rows: PagedRows) -> torch.Tensor:
            return model.forward(token_ids_T, positions_T, storage.layers, rows)

        self._program = StepProgram(model, forward, self.state, adapter_rows)

    def upload(self, message: Step) -> None:
        """Put a step's bytes where the device fetches those of the next step, and take down what else it says."""
        self.state.tell(message.histories, message.lists)
        row = self._uploads_QB[self.num_steps % STEPS_IN_FLIGHT].numpy()
        row[: len(message.inputs)] = np.frombuffer(message.inputs, dtype=np.uint8)

    def start_again(self) -> None:
        """Let the device count as the host does, after a step that failed to start."""
        self._counter.fill_(self.num_steps)

    def tokens(self, index: int) -> npt.NDArray[np.int32]:
        """Where the tokens of step ``index`` arrive on the host."""
        found: npt.NDArray[np.int32] = self._results_QS[index % STEPS_IN_FLIGHT].numpy()
        return found

    def send_reports(self, index: int, count: int) -> npt.NDArray[np.int32]:
        """Send the last step's first ``count`` reports down; they are there when the step is done."""
        reports_SW = self._reports_QSW[index % STEPS_IN_FLIGHT, :count]
        reports_SW.copy_(self._reports_SW[:count], non_blocking=True)
        found: npt.NDArray[np.int32] = reports_SW.numpy()
        return found

    def __call__(self, shape: StepShape) -> None:
        """Compute the step of this shape whose bytes were uploaded: all of it runs on the device."""
        step, computed = self.compute(shape)
        assert computed.tokens_R is not None
        if computed.reports_RW is not None:
            self._reports_SW[: len(computed.reports_RW)].copy_(computed.reports_RW)
        self.publish(step, computed.tokens_R)

    def compute(self, shape: StepShape, message: Step | None = None) -> tuple[StepTensors, Computed]:
        """The step whose bytes were uploaded, up to its tokens; see ``StepProgram``."""
        step = self._steps.get(shape)
        if step is None:
            step = view_step(self._inputs, shape, self._tables_GSB)
            if not shape.num_drafts:  # with drafts, there is no end of shapes
                self._steps[shape] = step
        ops.pull_step(self._inputs, self._uploads_QB, self._counter)
        for group, rows in enumerate(step.rows.groups):
            self._stage(step, rows.block_tables_SB, group * shape.num_seqs)
        return step, self._program(step, shape, message)

    def publish(self, step: StepTensors, tokens_S: torch.Tensor) -> None:
        """Let the next step and the host find each sequence's last token, and count the step."""
        last_tokens_C = self.state.last_tokens_C
        ops.publish_tokens(tokens_S, step.batch_indices_S, last_tokens_C, self._results_QS, self._counter)

    def _stage(self, step: StepTensors, block_tables_SB: torch.Tensor, first: int) -> None:
        ops.stage_step(
            step.token_ids_T,
            step.rows.cu_seqlens_q,
            step.batch_indices_S,
            self.state.last_tokens_C,
            step.packed_tables,
            step.width,
            block_tables_SB,
            first,
        )


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
