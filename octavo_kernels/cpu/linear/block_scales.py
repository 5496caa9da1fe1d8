"""How the scales of packed blocks are stored, for the kernels: as floats, or as multiples of a block's factors.

See ``PackedBlocks``. A factor times a multiple is exact in float32, so results are the same bits either way.

In Q2_K and Q3_K even a number times its multiple fits a byte. There a group of activations *joins* four groups of the
weight: totals are of numbers times multiples, exact in int32, and then scaled once by the factor.
"""

from __future__ import annotations

import torch
from llvmlite import ir

from octavo.ops.linear.block_linear import BLOCK, FACTOR_BYTES, PANEL, PackedBlocks
from octavo_kernels.cpu.linear.quantize import zero_of_bytes
from octavo_kernels.cpu.vector_ir import (
    FLOAT16,
    FLOAT32,
    FORMAT_BYTES,
    I8,
    I32,
    F32x16,
    I8x16,
    I32x16,
    constant,
    i64,
    load,
    load_floats,
    offset,
)

MULTIPLES = len(FORMAT_BYTES)
"""The format of scales that are stored as int8 multiples of a block's factors; all others are formats of floats."""
JOINED = MULTIPLES + 1
"""The same, of groups of JOINED_GROUP that are joined."""
JOINED_GROUP = 16
JOINED_ZERO = 4
"""The zero point of such groups without minima; with minima it is 0."""


def format_of(packed: PackedBlocks) -> int:
    """The format of a weight's scales."""
    if packed.joins_groups:
        return JOINED
    if packed.has_multiples:
        return MULTIPLES
    return FLOAT16 if packed.scales.dtype == torch.float16 else FLOAT32


def scale_bytes(scale_format: int, group: int, parts: int) -> int:
    """Bytes of a group's scales, and minima, in a panel: of multiples, with the group's share of the factors.

    ``group`` inputs are those of a group of activations, which may join several groups.
    """
    if scale_format == JOINED:
        return group // JOINED_GROUP * scale_bytes(MULTIPLES, JOINED_GROUP, parts)
    if scale_format == MULTIPLES:
        return parts * PANEL * (BLOCK + FACTOR_BYTES * group) // BLOCK
    return parts * PANEL * FORMAT_BYTES[scale_format]


def load_scales(
    b: ir.IRBuilder, scale_format: int, group: int, parts: int, base: ir.Value, g: ir.Value
) -> list[ir.Value]:
    """Scales, and minima, of group g of the panel at ``base``: ``parts`` vectors in float32; for joined groups their
    factor, and the minimum of each."""
    if scale_format < MULTIPLES:
        place = offset(b, base, (g, scale_bytes(scale_format, group, parts)))
        return [load_floats(b, scale_format, place, PANEL * FORMAT_BYTES[scale_format] * part) for part in range(parts)]
    each = BLOCK // group
    block = offset(b, base, (b.sdiv(g, i64(each)), each * scale_bytes(scale_format, group, parts)))
    factors = [load_floats(b, FLOAT16, block, FACTOR_BYTES * PANEL * part) for part in range(parts)]
    if scale_format == MULTIPLES:
        return [_times(b, factors[part], load_multiple(b, group, parts, base, g, part)) for part in range(parts)]
    minima = [
        _times(b, factors[1], load_multiple(b, JOINED_GROUP, parts, base, joined_group(b, group, g, i64(i)), 1))
        for i in range((parts - 1) * group // JOINED_GROUP)
    ]
    return [factors[0], *minima]


def joined_group(b: ir.IRBuilder, group: int, g: ir.Value, i: ir.Value) -> ir.Value:
    """The number of the ``i``th group of the weight in group g of ``group`` activations."""
    return b.add(b.mul(g, i64(group // JOINED_GROUP)), i)


def load_multiple(b: ir.IRBuilder, group: int, parts: int, base: ir.Value, g: ir.Value, part: int) -> ir.Value:
    """The multiples, int8, of the scales of group g of the weight, or with part 1 of its minima."""
    each = BLOCK // group
    block = offset(b, base, (b.sdiv(g, i64(each)), each * scale_bytes(MULTIPLES, group, parts)))
    multiples = offset(b, block, (b.srem(g, i64(each)), parts * PANEL))
    return load(b, I8x16, multiples, PANEL * (FACTOR_BYTES * parts + part))


def _times(b: ir.IRBuilder, factor: ir.Value, multiple: ir.Value) -> ir.Value:
    return b.fmul(factor, b.sitofp(b.sext(multiple, I32x16), F32x16))


def times_multiple(b: ir.IRBuilder, numbers: ir.Value, multiple: ir.Value, has_minima: bool) -> ir.Value:
    """Numbers, four of each row, less their zero point and times the row's multiple: bytes with ``zero_of_bytes``."""
    kind = ir.VectorType(I8, 4 * PANEL)
    each = ir.Constant(ir.VectorType(I32, kind.count), [k // 4 for k in range(kind.count)])
    zero = 0 if has_minima else JOINED_ZERO
    less = b.sub(b.bitcast(numbers, kind), constant(kind, zero))
    product = b.mul(less, b.shuffle_vector(multiple, multiple, each))
    return b.bitcast(b.add(product, constant(kind, zero_of_bytes(zero, 2))), I32x16)
