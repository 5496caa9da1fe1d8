"""Binary layout of a step: arrays at offsets given by its shape, written by the encoder and read in place.

Shapes: T rows, S sequences, R sampled rows, G KV groups, B entries of the widest block table.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from octavo.steps.graph_shapes import StepShape

ALIGNMENT = 16
WORD = 8
"""Bytes of a word, the unit in which executors fetch a step; ``num_words`` is the step's size in words."""
NO_INDEX = -1
"""Batch index of padding: the last entry of the executor's tables."""


class Field(NamedTuple):
    """One array of a step: elements ``first`` to ``end`` of the buffer viewed as ``dtype``."""

    dtype: str
    first: int
    end: int


def _fields(shape: StepShape, num_groups: int) -> dict[str, tuple[str, int]]:
    """Type and length of each array; ``num_words`` must come first."""
    T, S, R = shape.num_rows, shape.num_seqs, shape.num_samples
    fields = {
        "num_words": ("int64", 1),
        "token_ids": ("int64", T),
        "positions": ("int64", T),
        "slot_mapping": ("int64", T * num_groups),
        "batch_indices": ("int64", S),
        "seeds": ("int64", R),
        "cu_seqlens": ("int32", S + 1),
        "seq_lens": ("int32", S),
        "state_slots": ("int32", S),
        "sample_positions": ("int32", R),
        "top_k": ("int32", R),
        "temperature": ("float32", R),
        "min_p": ("float32", R),
        "top_p": ("float32", R),
        "width": ("int32", 1),
    }
    if shape.has_extras:
        fields |= {
            "row_indices": ("int64", T),
            "bias_indices": ("int64", R),
            "ban_indices": ("int64", R),
            "min_stops": ("int32", R),
            "history_indices": ("int32", R),
            "num_prompt_tokens": ("int32", R),
            "repetition": ("float32", R),
            "frequency": ("float32", R),
            "presence": ("float32", R),
            "wants_logprobs": ("int32", R),
        }
    if shape.has_adapters:
        fields["adapters"] = ("int32", T)
    if shape.has_drafter:
        fields |= {"next_tokens": ("int32", S), "capacities": ("int32", S)}
    if shape.num_drafts:
        fields |= {"cu_samples": ("int32", S + 1), "logits_indices": ("int64", R)}
    if shape.is_verification:
        fields["row_seqs"] = ("int32", T)
    if shape.has_images:
        fields["embedding_slots"] = ("int64", T)
    if shape.num_axes:
        fields["rope_shifts"] = ("int64", T * shape.num_axes)
    return fields


@functools.lru_cache(maxsize=4096)
def layout(shape: StepShape, num_groups: int = 1) -> tuple[dict[str, Field], int]:
    """The arrays of a step by name, and the byte offset of the block tables, int32 [G, S, B], behind them."""
    fields, end = {}, 0
    for name, (dtype, size) in _fields(shape, num_groups).items():
        width = np.dtype(dtype).itemsize
        fields[name] = Field(dtype, end // width, end // width + size)
        end = -(-(end + size * width) // ALIGNMENT) * ALIGNMENT
    return fields, end


def num_bytes(shape: StepShape, width: int, num_groups: int = 1) -> int:
    """Size of a step of this shape with block tables of ``width`` entries."""
    tables = 4 * num_groups * shape.num_seqs * width
    return -(-(layout(shape, num_groups)[1] + tables) // ALIGNMENT) * ALIGNMENT


class StepArrays:
    """Writes a step's arrays to a zeroed buffer of ``num_bytes``."""

    def __init__(self, buffer: bytearray, shape: StepShape, width: int, num_groups: int) -> None:
        """``width``: entries of each block table."""
        self._by_type = {dtype: np.frombuffer(buffer, dtype=dtype) for dtype in ("int64", "int32", "float32")}
        self._fields, self._tables_at = layout(shape, num_groups)
        self.shape, self._width, self._num_groups = shape, width, num_groups

    def fill(self, name: str, values: npt.NDArray[Any] | list[int], padding: int) -> None:
        """Set an array to ``values`` followed by padding."""
        dtype, first, last = self._fields[name]
        numbers, end = self._by_type[dtype], first + len(values)
        numbers[first:end] = values
        if end < last:
            numbers[end:last] = padding

    def fill_rows(self, name: str, values_AT: npt.NDArray[np.int64]) -> None:
        """Set an array of several numbers for each row, all rows of the first one before the next; the rest is 0."""
        first, T = self._fields[name].first, self.shape.num_rows
        A, count = values_AT.shape
        self._by_type["int64"][first : first + A * T].reshape(A, T)[:, :count] = values_AT

    def fill_group(self, group: int, slots_T: npt.NDArray[np.int64], tables_SB: npt.NDArray[np.int32]) -> None:
        """Set a KV group's slot mapping and block tables; the rest is padding."""
        T, (S, B) = self.shape.num_rows, (self.shape.num_seqs, self._width)
        first = self._fields["slot_mapping"].first + group * T
        slots = self._by_type["int64"]
        slots[first : first + len(slots_T)] = slots_T
        slots[first + len(slots_T) : first + T] = -1
        start = self._tables_at // 4 + group * S * B
        self._by_type["int32"][start : start + S * B].reshape(S, B)[: len(tables_SB)] = tables_SB

    def finish(self) -> None:
        """Set ``width`` and ``num_words``."""
        end = self._tables_at + 4 * self._num_groups * self.shape.num_seqs * self._width
        self._by_type["int32"][self._fields["width"].first] = self._width
        self._by_type["int64"][self._fields["num_words"].first] = -(-end // WORD)
