"""Dot products of a few rows of a weight with a few rows of activations: the inner loop of ``linear``.

Each pair of rows has sixteen partial sums, one per lane, that run along K in steps of 16 and are added at the end in a
fixed order. If the weight has scales, the products of each group of inputs are summed separately, and the sums are
multiplied by the group's scale. A pair's instructions are the same in every tile, hence also its bits.
"""

from __future__ import annotations

from dataclasses import dataclass

from llvmlite import ir

from octavo_kernels.cpu.compiled import Constant, emitted
from octavo_kernels.cpu.vector_ir import (
    AHEAD,
    E4M3,
    E4M3_FACTOR,
    F32,
    FLOAT32,
    FORMAT_BYTES,
    HAS_AVX512,
    LANES,
    F32x16,
    Loop,
    ask_for,
    constant,
    fma,
    i64,
    load,
    load_floats,
    offset,
    shuffle,
    splat,
    store,
    sum_lanes,
)

TILES = ((4, 6), (4, 4), (4, 2), (4, 1)) if HAS_AVX512 else ((2, 3), (2, 2), (4, 1))
"""(weight rows, tokens): the sums of the largest and their operands just fit the registers."""


@emitted()
def dense_dot(
    b: ir.IRBuilder, number_format: Constant, weight: ir.Value, scales: ir.Value, group: ir.Value, x: ir.Value,
    num_columns: ir.Value, out: ir.Value, out_stride: ir.Value, num_rows: ir.Value, num_tokens: ir.Value,
) -> None:  # fmt: skip
    """Dot products of rows of ``num_columns`` numbers, a multiple of 16: the weight in a number format, x in float32.

    ``(num_rows, num_tokens)`` is one of TILES, or (1, 1). ``out`` gets ``num_rows`` float32 for each token,
    ``out_stride`` bytes apart. E4M3 weights have ``scales``, float32 [num_rows, groups], one for each ``group`` columns
    (a multiple of 16); other formats ignore both. The first argument is a constant; those that are neither counts nor
    strides are addresses.
    """
    for rows, tokens in (*TILES, (1, 1)):
        is_rows = b.icmp_signed("==", num_rows, i64(rows))
        with b.if_then(b.and_(is_rows, b.icmp_signed("==", num_tokens, i64(tokens)))):
            _emit_tile(b, number_format, rows, tokens, weight, scales, group, x, num_columns, out, out_stride)


@dataclass(frozen=True)
class _Tile:
    """A few rows of the weight and a few rows of activations."""

    number_format: int
    rows: list[ir.Value]
    """Addresses of rows of the weight."""
    tokens: list[ir.Value]
    """Addresses of rows of activations."""

    def sums(self, b: ir.IRBuilder, weight: ir.Value, first: ir.Value, count: ir.Value) -> list[ir.Value]:
        """Sums of products over ``count`` vectors of columns from ``first`` on, for each token and row."""
        item = FORMAT_BYTES[self.number_format]
        with Loop(b, count, [constant(F32x16, 0.0)] * (len(self.rows) * len(self.tokens))) as loop:
            step = b.add(first, loop.index)
            column = b.mul(step, i64(LANES))
            w = [load_floats(b, self.number_format, offset(b, row, (column, item))) for row in self.rows]
            a = [load(b, F32x16, offset(b, token, (column, FORMAT_BYTES[FLOAT32]))) for token in self.tokens]
            num_bytes = len(self.rows) * LANES * item
            ask_for(b, offset(b, weight, (step, num_bytes)), num_bytes, AHEAD)
            pairs = [(token, row) for token in a for row in w]
            loop.carried = [fma(b, x, y, total) for (x, y), total in zip(pairs, loop.carried, strict=True)]
        return loop.results


def _emit_tile(
    b: ir.IRBuilder,
    number_format: int,
    num_rows: int,
    num_tokens: int,
    weight: ir.Value,
    scales: ir.Value,
    group: ir.Value,
    x: ir.Value,
    num_columns: ir.Value,
    out: ir.Value,
    out_stride: ir.Value,
) -> None:
    item = FORMAT_BYTES[number_format]
    rows = [offset(b, weight, (num_columns, item * row)) for row in range(num_rows)]
    tokens = [offset(b, x, (num_columns, FORMAT_BYTES[FLOAT32] * token)) for token in range(num_tokens)]
    tile = _Tile(number_format, rows, tokens)
    num_steps = b.sdiv(num_columns, i64(LANES))
    if number_format == E4M3:
        totals = _emit_groups(b, tile, weight, scales, b.sdiv(group, i64(LANES)), num_steps)
    else:
        totals = tile.sums(b, weight, i64(0), num_steps)
    for first in range(0, len(totals), LANES):
        vectors = totals[first : first + LANES]
        sums = sum_lanes(b, vectors + [constant(F32x16, 0.0)] * (LANES - len(vectors)))
        for lane in range(0, len(vectors), num_rows):
            token = (first + lane) // num_rows
            part = shuffle(b, sums, sums, range(lane, lane + num_rows))
            store(b, part, offset(b, out, (out_stride, token)))


def _emit_groups(
    b: ir.IRBuilder, tile: _Tile, weight: ir.Value, scales: ir.Value, group_steps: ir.Value, num_steps: ir.Value
) -> list[ir.Value]:
    """For each token and row: the sum over groups of (sum of the group's products) * (the group's scale)."""
    num_groups = b.sdiv(b.add(num_steps, b.sub(group_steps, i64(1))), group_steps)
    with Loop(b, num_groups, [constant(F32x16, 0.0)] * (len(tile.rows) * len(tile.tokens))) as loop:
        first, rows = b.mul(loop.index, group_steps), range(len(tile.rows))
        left = b.sub(num_steps, first)
        sums = tile.sums(b, weight, first, b.select(b.icmp_signed("<", left, group_steps), left, group_steps))
        places = [offset(b, scales, (loop.index, 4), (num_groups, 4 * row)) for row in rows]
        scale = ir.Constant(F32, E4M3_FACTOR)
        factors = [splat(b, b.fmul(load(b, F32, place), scale)) for place in places] * len(tile.tokens)
        triples = zip(sums, factors, loop.carried, strict=True)
        loop.carried = [fma(b, part, factor, total) for part, factor, total in triples]
    return loop.results
