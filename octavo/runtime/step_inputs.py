"""What a step is told, in one piece: packed by the host, sent to the device in one copy, read there in place.

The device keeps nothing of plain requests but the token that each sampled last, so that the next step can start
before the host knows it. All else is told with every step. That costs little: an entry of a block table is four bytes
for a whole block of keys and values, which the step reads too. What it keeps of others: see ``step_extras``.

Shapes: T rows, S sequences, B entries of the widest block table.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from octavo.ops.attention import GroupRows, PagedRows
from octavo.ops.sample import SampleParams

ALIGNMENT = 16
Ints = npt.NDArray[np.int64]


class StepShape(NamedTuple):
    """Sizes of a step's tensors; rows and sequences beyond those of the plan are padding."""

    num_rows: int
    num_seqs: int
    max_query_len: int
    has_extras: bool = False
    """Whether any request wants more than a plain token, see ``step_extras``."""
    has_adapters: bool = False
    """Whether the step looks for adapters of its rows."""

    def holds(self, other: StepShape) -> bool:
        """Whether a step of shape ``other`` may be brought to this one by padding."""
        are_alike = (self.max_query_len == 1) == (other.max_query_len == 1)
        are_alike = are_alike and self[3:] == other[3:]
        return are_alike and self.num_rows >= other.num_rows and self.num_seqs >= other.num_seqs


class Field(NamedTuple):
    """One array of a step, at ``start`` bytes from the beginning."""

    dtype: str
    size: int
    start: int

    @property
    def end(self) -> int:
        return self.start + self.size * np.dtype(self.dtype).itemsize


def slot_mapping(group: int) -> str:
    """Name of the array of slots in a KV group."""
    return f"slot_mapping_{group}"


@functools.lru_cache(maxsize=1024)
def layout(shape: StepShape, num_groups: int = 1) -> tuple[dict[str, Field], int]:
    """The arrays of a step by name, and where the packed block tables begin: those of all sequences in one KV group,
    then in the next."""
    T, S = shape.num_rows, shape.num_seqs
    wanted = {
        "num_words": ("int64", 1),
        "token_ids": ("int64", T),
        "positions": ("int64", T),
        "cells": ("int64", S),
        "seeds": ("int64", S),
        "cu_seqlens": ("int32", S + 1),
        "seq_lens": ("int32", S),
        "sample_positions": ("int32", S),
        "top_k": ("int32", S),
        "temperature": ("float32", S),
        "min_p": ("float32", S),
        "top_p": ("float32", S),
        "width": ("int32", 1),
    }
    if shape.has_extras:
        wanted |= {
            "row_cells": ("int64", T),
            "bias_cells": ("int64", S),
            "ban_cells": ("int64", S),
            "history": ("int32", S),
            "num_prompt_tokens": ("int32", S),
            "repetition": ("float32", S),
            "frequency": ("float32", S),
            "presence": ("float32", S),
            "wants_logprobs": ("int32", S),
        }
    if shape.has_adapters:
        wanted["adapters"] = ("int32", T)
    wanted |= {slot_mapping(group): ("int64", T) for group in range(num_groups)}
    fields, end = {}, 0
    for name, (dtype, size) in wanted.items():
        fields[name] = Field(dtype, size, end)
        end = -(-fields[name].end // ALIGNMENT) * ALIGNMENT
    return fields, end


def num_bytes(shape: StepShape, width: int, num_groups: int = 1) -> int:
    """What a step of this shape takes with block tables of ``width`` entries."""
    tables = 4 * num_groups * shape.num_seqs * width
    return -(-(layout(shape, num_groups)[1] + tables) // ALIGNMENT) * ALIGNMENT


class HostStep:
    """A step's arrays in a buffer of the host (uint8)."""

    def __init__(self, buffer: Tensor, shape: StepShape, num_groups: int = 1) -> None:
        self._raw = buffer.numpy()
        fields, self._tables_at = layout(shape, num_groups)
        self._num_seqs = shape.num_seqs
        self.arrays = {name: self._raw[field.start : field.end].view(field.dtype) for name, field in fields.items()}

    def fill(self, name: str, values: npt.NDArray[Any] | list[int], padding: int) -> None:
        """Set an array: ``values``, then padding."""
        array = self.arrays[name]
        array[: len(values)] = values
        array[len(values) :] = padding

    def fill_tables(self, *tables: npt.NDArray[np.int32]) -> None:
        """Set the block tables of the first sequences in each KV group, and how much of the buffer is in use."""
        width = tables[0].shape[1]
        self.arrays["width"][0] = width
        end = self._tables_at
        for of_group in tables:
            start, end = end, end + 4 * self._num_seqs * width
            packed = self._raw[start:end].view(np.int32).reshape(self._num_seqs, width)
            packed[: len(of_group)] = of_group
            packed[len(of_group) :] = 0
        self.arrays["num_words"][0] = -(-end // 8)


class ExtraInputs(NamedTuple):
    """What a step is told of wishes beside tokens, as tensors; a negative cell is that of nobody."""

    row_cells_T: Tensor
    """Whose history gets the row's token."""
    bias_cells_S: Tensor
    ban_cells_S: Tensor
    history_S: Tensor
    """The cell of the history that penalties look at."""
    num_prompt_tokens_S: Tensor
    repetition_S: Tensor
    frequency_S: Tensor
    presence_S: Tensor
    wants_logprobs_S: Tensor
    """1 or 0."""


class DeviceStep(NamedTuple):
    """A step's tensors: views of a buffer of the device."""

    token_ids_T: Tensor
    positions_T: Tensor
    cells_S: Tensor
    width: Tensor
    packed_tables: Tensor
    rows: PagedRows
    params: SampleParams
    extras: ExtraInputs | None
    adapters_T: Tensor | None
    """The place of the adapter that each row wants, see ``ops.stacked_lora``."""


def view_step(buffer: Tensor, shape: StepShape, block_tables_PSB: Tensor) -> DeviceStep:
    """The tensors of a step in ``buffer`` (uint8); its block tables are those that ``stage_step`` fills in, of each of
    P KV groups."""
    fields, tables_at = layout(shape, len(block_tables_PSB))
    at = {name: buffer[f.start : f.end].view(getattr(torch, f.dtype)) for name, f in fields.items()}
    tables_end = tables_at + (len(buffer) - tables_at) // 4 * 4
    groups = [
        GroupRows(at[slot_mapping(group)], tables_SB[: shape.num_seqs])
        for group, tables_SB in enumerate(block_tables_PSB)
    ]
    return DeviceStep(
        token_ids_T=at["token_ids"],
        positions_T=at["positions"],
        cells_S=at["cells"],
        width=at["width"],
        packed_tables=buffer[tables_at:tables_end].view(torch.int32),
        rows=PagedRows(tuple(groups), at["cu_seqlens"], at["seq_lens"], shape.max_query_len),
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
    )
