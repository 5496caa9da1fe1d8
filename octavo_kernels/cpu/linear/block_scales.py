"""How the scales of packed blocks are stored, for the kernels: as floats, or as multiples of a block's factors.

See ``PackedBlocks``. A factor times a multiple is exact in float32, so results are the same bits either way.
"""

from __future__ import annotations

import torch
from llvmlite import ir

from octavo.ops.block_linear import BLOCK, FACTOR_BYTES, PANEL, PackedBlocks
from octavo_kernels.cpu.vector_ir import (
    FLOAT16,
    FLOAT32,
    FORMAT_BYTES,
    F32x16,
    I8x16,
    I32x16,
    i64,
    load,
    load_floats,
    offset,
)

MULTIPLES = len(FORMAT_BYTES)
"""The format of scales that are stored as int8 multiples of a block's factors; all others are formats of floats."""


def format_of(packed: PackedBlocks) -> int:
    """The format of a weight's scales."""
    if packed.has_multiples:
        return MULTIPLES
    return FLOAT16 if packed.scales.dtype == torch.float16 else FLOAT32


def scale_bytes(scale_format: int, group: int, parts: int) -> int:
    """Bytes of a group's scales, and minima, in a panel: of multiples, with the group's share of the factors."""
    if scale_format == MULTIPLES:
        return parts * PANEL * (BLOCK + FACTOR_BYTES * group) // BLOCK
    return parts * PANEL * FORMAT_BYTES[scale_format]


def load_scales(
    b: ir.IRBuilder, scale_format: int, group: int, parts: int, base: ir.Value, g: ir.Value
) -> list[ir.Value]:
    """Scales, and minima, of group g of the panel at ``base``: ``parts`` vectors in float32."""
    if scale_format != MULTIPLES:
        place = offset(b, base, (g, scale_bytes(scale_format, group, parts)))
        return [load_floats(b, scale_format, place, PANEL * FORMAT_BYTES[scale_format] * part) for part in range(parts)]
    each = BLOCK // group
    block = offset(b, base, (b.sdiv(g, i64(each)), each * scale_bytes(scale_format, group, parts)))
    multiples = offset(b, block, (b.srem(g, i64(each)), parts * PANEL))
    found = []
    for part in range(parts):
        factor = load_floats(b, FLOAT16, block, FACTOR_BYTES * PANEL * part)
        multiple = b.sext(load(b, I8x16, multiples, PANEL * (FACTOR_BYTES * parts + part)), I32x16)
        found.append(b.fmul(factor, b.sitofp(multiple, F32x16)))
    return found
