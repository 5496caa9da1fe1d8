"""A step's arrays as tensors: views of the buffer that holds its bytes.

Shapes: T rows, S sequences, R sampled rows, G groups, B entries of the widest block table.
"""

from __future__ import annotations

import sys
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from octavo.ops.attention.attention import GroupRows, PagedRows, SingleRows
from octavo.ops.sampling.sampling import SampleParams
from octavo.ops.stepping import StagedRows
from octavo.steps.graph_shapes import StepShape
from octavo.steps.layout import layout
from octavo.steps.messages import Step

MOST_BUFFERS = 16
TYPES: dict[str, torch.dtype] = {"int64": torch.int64, "int32": torch.int32, "float32": torch.float32}


class ExtraInputs(NamedTuple):
    """A step's inputs for penalties, biases, bans and log-probabilities; a negative index selects the padding entry."""

    row_indices_T: Tensor
    """Batch index whose history the row's token is written to."""
    bias_indices_R: Tensor
    ban_indices_R: Tensor
    min_stops_R: Tensor
    """Stop tokens are banned at positions before this."""
    history_indices_R: Tensor
    """Batch index whose history the penalties use."""
    num_prompt_tokens_R: Tensor
    repetition_R: Tensor
    frequency_R: Tensor
    presence_R: Tensor
    wants_logprobs_R: Tensor
    """1 if the row's log-probabilities are requested, else 0."""


class StepTensors(NamedTuple):
    """A step's tensors."""

    token_ids_T: Tensor
    positions_T: Tensor
    batch_indices_S: Tensor
    width: Tensor
    packed_tables: Tensor
    """int32: block tables of the first group, concatenated over sequences, then those of the next group."""
    tables_GSB: Tensor
    """int32: where they are unpacked."""
    slots_GT: Tensor
    rows: PagedRows
    params: SampleParams
    extras: ExtraInputs | None
    adapters_T: Tensor | None
    """The adapter number of each row."""
    logits_indices_R: Tensor | None
    """Rows that are sampled; ``None``: the last row of each sequence."""
    cu_samples: Tensor | None
    """int32 [S + 1]: the sampled rows of each sequence; ``None``: each has one."""
    next_tokens_S: Tensor | None
    """int32, for drafters: the token behind each sequence's last row, negative where it is sampled."""
    capacities_S: Tensor | None
    """int32, for drafters: positions that have a block in every KV group."""
    embedding_slots_T: Tensor | None
    """int64: where the embedding of a row is in the pool, -1 for a token; ``None`` if all rows are tokens."""

    @property
    def staged(self) -> StagedRows:
        """The rows that ``ops.stage_step`` completes."""
        return StagedRows(
            self.positions_T,
            self.slots_GT,
            self.params.position,
            self.rows.seq_lens_S,
            self.rows.cu_seqlens_q,
            self.cu_samples,
            self.batch_indices_S,
        )


def batch_indices(message: Step, num_groups: int) -> list[int]:
    """The batch indices of a step's sequences."""
    _, first, _ = layout(message.shape, num_groups)[0]["batch_indices"]
    indices: list[int] = np.frombuffer(message.inputs, dtype=np.int64)[first : first + message.num_seqs].tolist()
    return indices


def view_host_step(inputs: bytearray, shape: StepShape, num_groups: int) -> StepTensors:
    """The tensors of a step in host memory; block tables are views of the packed ones."""
    fields, tables_at = layout(shape, num_groups)
    by_type = {dtype: np.frombuffer(inputs, dtype=dtype) for dtype in TYPES}
    at = {name: torch.from_numpy(by_type[dtype][first:end]) for name, (dtype, first, end) in fields.items()}
    width, T, S = int(at["width"]), shape.num_rows, shape.num_seqs
    tables = torch.from_numpy(by_type["int32"][tables_at // 4 : tables_at // 4 + num_groups * S * width])
    slots_GT, tables_GSB = at["slot_mapping"].view(num_groups, T), tables.view(num_groups, S, width)
    return _step_tensors(at, shape, slots_GT, tables_GSB, tables)


class StepBuffers:
    """Copies of steps in host memory, one for each form: views take longer to make than to fill."""

    def __init__(self, num_groups: int) -> None:
        self._num_groups = num_groups
        self._made: dict[tuple[StepShape, int], tuple[bytearray, StepTensors, npt.NDArray[np.int64]]] = {}

    def filled(self, message: Step) -> tuple[StepTensors, npt.NDArray[np.int64]]:
        """The tensors of a step, valid until the next one, and its token ids [T], which are among them."""
        shape, at = message.shape, 4 * layout(message.shape, self._num_groups)[0]["width"].first
        form = shape, int.from_bytes(message.inputs[at : at + 4], sys.byteorder)
        made = self._made.get(form)
        if made is None:
            if len(self._made) == MOST_BUFFERS:
                del self._made[next(iter(self._made))]
            buffer = bytearray(message.inputs)
            step = view_host_step(buffer, shape, self._num_groups)
            made = self._made[form] = buffer, step, step.token_ids_T.numpy()
        else:
            made[0][:] = message.inputs
        return made[1:]


def view_step(buffer: Tensor, shape: StepShape, tables_GSB: Tensor) -> StepTensors:
    """The tensors of a step in ``buffer`` (uint8); block tables are views of ``tables_GSB``, to be unpacked there."""
    num_groups = len(tables_GSB)
    fields, tables_at = layout(shape, num_groups)
    by_type = {name: buffer.view(dtype) for name, dtype in TYPES.items()}
    at = {name: by_type[dtype][first:end] for name, (dtype, first, end) in fields.items()}
    slots_GT = at["slot_mapping"].view(num_groups, shape.num_rows)
    return _step_tensors(at, shape, slots_GT, tables_GSB[:, : shape.num_seqs], by_type["int32"][tables_at // 4 :])


def _step_tensors(
    at: dict[str, Tensor], shape: StepShape, slots_GT: Tensor, tables_GSB: Tensor, packed_tables: Tensor
) -> StepTensors:
    groups = [GroupRows(slots_T, tables_SB) for slots_T, tables_SB in zip(slots_GT, tables_GSB, strict=True)]
    return StepTensors(
        token_ids_T=at["token_ids"],
        positions_T=at["positions"],
        batch_indices_S=at["batch_indices"],
        width=at["width"],
        packed_tables=packed_tables,
        tables_GSB=tables_GSB,
        slots_GT=slots_GT,
        rows=PagedRows(
            tuple(groups),
            at["cu_seqlens"],
            at["seq_lens"],
            shape.max_query_len,
            single=SingleRows(at["row_seqs"], at["positions"]) if "row_seqs" in at else None,
            has_long_context=shape.has_long_context,
            most_context=shape.most_context,
            rope_shifts_AT=at["rope_shifts"].view(shape.num_axes, -1) if shape.num_axes else None,
            state_slots_S=at["state_slots"],
        ),
        params=SampleParams(
            temperature=at["temperature"],
            min_p=at["min_p"],
            top_k=at["top_k"],
            top_p=at["top_p"],
            seed=at["seeds"],
            position=at["sample_positions"],
        ),
        extras=None if not shape.has_extras else ExtraInputs(*(at[name[:-2]] for name in ExtraInputs._fields)),
        adapters_T=at.get("adapters"),
        logits_indices_R=at.get("logits_indices"),
        cu_samples=at.get("cu_samples"),
        next_tokens_S=at.get("next_tokens"),
        capacities_S=at.get("capacities"),
        embedding_slots_T=at.get("embedding_slots"),
    )
