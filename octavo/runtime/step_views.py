"""A step's arrays as tensors: views of the buffer that holds its bytes.

Shapes: T rows, S sequences, R sampled rows, G groups, B entries of the widest block table.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from octavo.ops.attention import GroupRows, PagedRows
from octavo.ops.sample import SampleParams
from octavo.steps.layout import layout
from octavo.steps.shapes import StepShape


class ExtraInputs(NamedTuple):
    """What a step says of penalties, biases, bans and log-probabilities; a negative index is that of padding."""

    row_indices_T: Tensor
    """Whose history gets the row's token."""
    bias_indices_R: Tensor
    ban_indices_R: Tensor
    history_indices_R: Tensor
    """Whose history penalties look at."""
    num_prompt_tokens_R: Tensor
    repetition_R: Tensor
    frequency_R: Tensor
    presence_R: Tensor
    wants_logprobs_R: Tensor
    """1 or 0."""


class StepTensors(NamedTuple):
    """A step's tensors."""

    token_ids_T: Tensor
    positions_T: Tensor
    batch_indices_S: Tensor
    width: Tensor
    packed_tables: Tensor
    """int32: entries of the first group's block tables, one sequence after the other, then of the next group's."""
    rows: PagedRows
    params: SampleParams
    extras: ExtraInputs | None
    adapters_T: Tensor | None
    """The number of the adapter that each row asks for."""
    logits_indices_R: Tensor | None
    """Rows that are sampled; ``None``: the last of each sequence."""


def view_step(buffer: Tensor, shape: StepShape, num_groups: int, tables_GSB: Tensor | None = None) -> StepTensors:
    """The tensors of a step in ``buffer`` (uint8).

    Its block tables are ``tables_GSB``, into which packed ones are to be copied, or the packed ones themselves.
    """
    fields, tables_at = layout(shape, num_groups)
    at = {name: buffer[f.start : f.end].view(getattr(torch, f.dtype)) for name, f in fields.items()}
    tables_end = tables_at + (len(buffer) - tables_at) // 4 * 4
    packed = buffer[tables_at:tables_end].view(torch.int32)
    if tables_GSB is None:
        width = int(at["width"])
        tables_GSB = packed[: num_groups * shape.num_seqs * width].view(num_groups, shape.num_seqs, width)
    lengths = at["cu_seqlens"], at["seq_lens"], shape.max_query_len
    slots_GT = at["slot_mapping"].view(num_groups, shape.num_rows)
    groups = [
        GroupRows(slots_T, tables_SB[: shape.num_seqs]) for slots_T, tables_SB in zip(slots_GT, tables_GSB, strict=True)
    ]
    return StepTensors(
        token_ids_T=at["token_ids"],
        positions_T=at["positions"],
        batch_indices_S=at["batch_indices"],
        width=at["width"],
        packed_tables=packed,
        rows=PagedRows(tuple(groups), *lengths),
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
    )
