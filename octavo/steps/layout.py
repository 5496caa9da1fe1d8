"""The bytes of a step: arrays at offsets that follow from its shape, written by the encoder and read in place.

Shapes: T rows, S sequences, R sampled rows, G groups of layers with block tables of their own, B entries of the widest
block table.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from octavo.steps.shapes import StepShape

ALIGNMENT = 16
WORD = 8
"""Bytes that are fetched at once: a step's size is told in words."""
NO_INDEX = -1
"""As a batch index: the last entry of the executor's tables, which belongs to padding."""


class Field(NamedTuple):
    """One array of a step, at ``start`` bytes from the beginning."""

    dtype: str
    size: int
    start: int

    @property
    def end(self) -> int:
        return self.start + self.size * np.dtype(self.dtype).itemsize


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
            "history_indices": ("int32", R),
            "num_prompt_tokens": ("int32", R),
            "repetition": ("float32", R),
            "frequency": ("float32", R),
            "presence": ("float32", R),
            "wants_logprobs": ("int32", R),
        }
    if shape.has_adapters:
        fields["adapters"] = ("int32", T)
    if shape.num_drafts:
        fields["logits_indices"] = ("int64", R)
    return fields


@functools.lru_cache(maxsize=4096)
def layout(shape: StepShape, num_groups: int = 1) -> tuple[dict[str, Field], int]:
    """The arrays of a step by name, and where the packed block tables begin: those of all sequences in the first group,
    then those in the next."""
    fields, end = {}, 0
    for name, (dtype, size) in _fields(shape, num_groups).items():
        fields[name] = Field(dtype, size, end)
        end = -(-fields[name].end // ALIGNMENT) * ALIGNMENT
    return fields, end


def num_bytes(shape: StepShape, width: int, num_groups: int = 1) -> int:
    """What a step of this shape takes with block tables of ``width`` entries."""
    tables = 4 * num_groups * shape.num_seqs * width
    return -(-(layout(shape, num_groups)[1] + tables) // ALIGNMENT) * ALIGNMENT


class StepArrays:
    """A step's arrays in a buffer of its size."""

    def __init__(self, buffer: bytearray, shape: StepShape, width: int, num_groups: int) -> None:
        """``width``: entries of each block table."""
        self._raw = np.frombuffer(buffer, dtype=np.uint8)
        self._fields, self._tables_at = layout(shape, num_groups)
        self._shape, self._width, self._num_groups = shape, width, num_groups

    def __getitem__(self, name: str) -> npt.NDArray[Any]:
        field = self._fields[name]
        return self._raw[field.start : field.end].view(field.dtype)

    def fill(self, name: str, values: npt.NDArray[Any] | list[int], padding: int) -> None:
        """Set an array: ``values``, then padding."""
        array, count = self[name], len(values)
        array[:count] = values
        if count < len(array):
            array[count:] = padding

    def fill_group(self, group: int, slots_T: npt.NDArray[np.int64], tables_SB: npt.NDArray[np.int32]) -> None:
        """Set the slot of each row in a group, and the block tables there of the first sequences."""
        T, (S, B) = self._shape.num_rows, (self._shape.num_seqs, self._width)
        slots = self["slot_mapping"][group * T : (group + 1) * T]
        slots[: len(slots_T)] = slots_T
        slots[len(slots_T) :] = -1
        start = self._tables_at + 4 * group * S * B
        tables = self._raw[start : start + 4 * S * B].view(np.int32).reshape(S, B)
        tables[: len(tables_SB)] = tables_SB

    def finish(self) -> None:
        """Say how wide tables are, and how much of the buffer is in use."""
        self["width"][0] = self._width
        end = self._tables_at + 4 * self._num_groups * self._shape.num_seqs * self._width
        self["num_words"][0] = -(-end // WORD)
