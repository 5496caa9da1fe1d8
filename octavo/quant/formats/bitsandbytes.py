"""Checkpoints of bitsandbytes: codes of 4 bits for the numbers of a table, or integers of 8 bits.

The tensors of a module of 4 bits (QLoRA, arXiv 2305.14314)::

    weight            uint8 [N K / 2, 1]  codes, the first of two in the high bits
    weight.quant_map  float [16]          the number of each code, from -1 to 1
    weight.absmax     float [B]           what the numbers of a block are multiplied by, or codes of these, uint8, with
    weight.nested_quant_map, weight.nested_absmax   the like of it for blocks of theirs
    weight.quant_state.bitsandbytes__nf4 (or __fp4) uint8: JSON, in which are ``nested_blocksize`` and ``nested_offset``

Kernels have no tables, so the numbers of one are rounded to multiples of a step, of 8 bits, that suits them best. That
moves an entry by at most 0.4 % of the largest of its block, where two numbers of NF4 are 8 % apart or more.

Of 8 bits (arXiv 2208.07339): ``weight`` int8 [N, K] and ``SCB`` float [N], 127 times the scale of each output.

Shapes: K inputs, N outputs, B blocks of N K / B entries of the flattened matrix.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from octavo.errors import CheckpointError
from octavo.quant.checkpoint_tensors import Tensors
from octavo.quant.config_reader import QuantKeys
from octavo.quant.formats.plain import Plain
from octavo.quant.stored.dummy_weights import dummy_grouped, is_quantised_dummy
from octavo.quant.stored.int_group_weight import GroupedStored
from octavo.quant.stored.stored_weight import DenseStored, StoredWeight

BITS = 8
TABLES = ("nf4", "fp4")
BLOCK = 64
"""Entries of a block, as the writer has it unless told otherwise; used for random weights alone."""
STEPS = range(64, 128)
MOST_STATE_BYTES = 4096


@dataclass(frozen=True)
class BitsAndBytes(Plain):
    """Modules with neither a table nor scales are unquantised."""

    has_tables: bool
    """``load_in_4bit``; used for random weights alone, as is ``kept``."""
    kept: tuple[str, ...] = ()
    """``llm_int8_skip_modules``"""

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> BitsAndBytes:
        """Read a ``quantization_config``. Raises ``CheckpointError``."""
        keys = QuantKeys(values)
        keys.word("bnb_4bit_quant_storage", ("uint8",), "uint8")
        return cls(keys.flag("load_in_4bit"), keys.names("llm_int8_skip_modules"))

    def matrix(self, name: str, shape: tuple[int, int], tensors: Tensors, is_transposed: bool) -> StoredWeight:
        N, K = shape
        if is_quantised_dummy(name, self.kept, tensors):
            groups = K // BLOCK if self.has_tables and K % BLOCK == 0 else 1
            return dummy_grouped(name, shape, BITS, groups, False, tensors)
        if tensors.dtype(f"{name}.weight") == torch.int8:
            codes_NK = tensors.typed(f"{name}.weight", shape, torch.int8)
            if tensors.has(f"{name}.weight_format"):
                tensors.typed(f"{name}.weight_format", (), torch.uint8)
            return GroupedStored(codes_NK, tensors.scales(f"{name}.SCB", (N,)).view(N, 1) / 127, None, BITS)
        if not tensors.has(f"{name}.weight.quant_map"):
            return super().matrix(name, shape, tensors, is_transposed)
        if N * K % 2:
            raise CheckpointError(f"module {name} has {N} x {K} entries; a byte holds two")
        packed = tensors.typed(f"{name}.weight", (N * K // 2, 1), torch.uint8).view(-1)
        table = tensors.scales(f"{name}.weight.quant_map", (16,))
        absmax_B = _absmax(name, tensors)
        if N * K % len(absmax_B):
            raise CheckpointError(f"tensor {name}.weight.absmax has {len(absmax_B)} blocks for {N} x {K} entries")
        steps, multiples = _rounded(table)
        codes = torch.stack((packed >> 4, packed & 15), dim=1).view(shape)
        if K % (N * K // len(absmax_B)):  # blocks that do not end with a row
            scales = absmax_B.repeat_interleave(N * K // len(absmax_B)).view(shape)
            return DenseStored((table[codes.int()] * scales,))
        return GroupedStored(multiples[codes.int()], absmax_B.view(N, -1) / steps, None, BITS)


def _absmax(name: str, tensors: Tensors) -> Tensor:
    """What the numbers of each block are multiplied by, float32 [B]."""
    at = f"{name}.weight.absmax"
    shape = tensors.shape(at) or ()
    if len(shape) != 1 or shape[0] == 0:
        raise CheckpointError(f"tensor {at} has shape {list(shape)}; expected one number for each block")
    states = [f"{name}.weight.quant_state.bitsandbytes__{table}" for table in TABLES]
    state = next(filter(tensors.has, states), states[0])
    size = tensors.shape(state)
    if size is None or len(size) != 1 or size[0] > MOST_STATE_BYTES:
        raise CheckpointError(f"module {name} has no quant_state of {' or '.join(TABLES)}")
    text = tensors.typed(state, size, torch.uint8)
    if not tensors.has(f"{name}.weight.nested_absmax"):
        return tensors.scales(at, shape)
    codes_B = tensors.typed(at, shape, torch.uint8)
    block, offset = (256, 0.0) if text.is_meta else _nesting(state, bytes(text.tolist()))
    outer = tensors.scales(f"{name}.weight.nested_absmax", (-(-shape[0] // block),))
    table = tensors.scales(f"{name}.weight.nested_quant_map", (256,))
    return table[codes_B.int()] * outer.repeat_interleave(block)[: shape[0]] + offset


def _nesting(name: str, text: bytes) -> tuple[int, float]:
    """Blocks of a block, and what is added to their numbers."""
    try:
        state = json.loads(text)
        block, offset = state["nested_blocksize"], state["nested_offset"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"tensor {name} is not JSON with nested_blocksize and nested_offset: {error}") from None
    if isinstance(block, bool) or not isinstance(block, int) or not 1 <= block <= 1 << 20:
        raise CheckpointError(f"tensor {name}: nested_blocksize is {block!r}; it must be from 1 to 1048576")
    if isinstance(offset, bool) or not isinstance(offset, int | float) or not abs(offset) < 1e30:
        raise CheckpointError(f"tensor {name}: nested_offset is {offset!r}; it must be a number")
    return block, float(offset)


def _rounded(table: Tensor) -> tuple[int, Tensor]:
    """The numbers of a table as multiples of 1 / steps, int8, for the number of steps with the least largest error."""
    if table.is_meta:
        return STEPS[-1], table.to(torch.int8)
    if not table.abs().max() <= 1:
        raise CheckpointError("quant_map of a module has numbers beyond 1")
    errors = [float((table - (table * steps).round() / steps).abs().max()) for steps in STEPS]
    steps = STEPS[errors.index(min(errors))]
    return steps, (table * steps).round().to(torch.int8)
