"""Dot products of a few rows of a weight with a few rows of activations: the inner loop of ``linear``.

Each pair of rows has sixteen partial sums, one per lane, that run along K in steps of 16 and are added at the end in a
fixed order. A pair's instructions are the same in every tile, hence also its bits.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types

from octavo.ops.cpu.compiled import emitted
from octavo.ops.cpu.vector_ir import (
    AHEAD,
    FLOAT32,
    FORMAT_BYTES,
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
    store,
    sum_lanes,
)

TOKEN_COUNTS = (6, 4, 2, 1)
TILES = (*((4, tokens) for tokens in TOKEN_COUNTS), (1, 1))
"""(weight rows, tokens): 24 sums and their operands just fit 32 registers; smaller tiles handle the remainder."""


@emitted
def dense_dot(
    context: Any,
    number_format: Any,
    weight: Any,
    x: Any,
    num_columns: Any,
    out: Any,
    out_stride: Any,
    num_rows: Any,
    num_tokens: Any,
) -> Any:
    """Dot products of rows of ``num_columns`` numbers, a multiple of 16: the weight in a number format, x in float32.

    ``(num_rows, num_tokens)`` is one of TILES. ``out`` gets ``num_rows`` float32 for each token, ``out_stride``
    bytes apart. The first argument is a constant; those that are neither counts nor strides are addresses.
    """
    if not isinstance(number_format, types.IntegerLiteral):
        return None
    kind = number_format.literal_value

    def emit(c: Any, b: ir.IRBuilder, _s: Any, args: Any) -> ir.Value:
        for rows, tokens in TILES:
            is_rows = b.icmp_signed("==", args[-2], i64(rows))
            with b.if_then(b.and_(is_rows, b.icmp_signed("==", args[-1], i64(tokens)))):
                _emit_tile(b, kind, rows, tokens, *args[1:-2])
        return c.get_dummy_value()

    return types.void(number_format, *([types.intp] * 7)), emit


def _emit_tile(
    b: ir.IRBuilder,
    number_format: int,
    num_rows: int,
    num_tokens: int,
    weight: ir.Value,
    x: ir.Value,
    num_columns: ir.Value,
    out: ir.Value,
    out_stride: ir.Value,
) -> None:
    item = FORMAT_BYTES[number_format]
    rows = [offset(b, weight, (num_columns, item * row)) for row in range(num_rows)]
    tokens = [offset(b, x, (num_columns, FORMAT_BYTES[FLOAT32] * token)) for token in range(num_tokens)]
    num_steps = b.sdiv(num_columns, i64(LANES))
    with Loop(b, num_steps, [constant(F32x16, 0.0)] * (num_rows * num_tokens)) as loop:
        column = b.mul(loop.index, i64(LANES))
        w = [load_floats(b, number_format, offset(b, row, (column, item))) for row in rows]
        a = [load(b, F32x16, offset(b, token, (column, FORMAT_BYTES[FLOAT32]))) for token in tokens]
        num_bytes = num_rows * LANES * item
        ask_for(b, offset(b, weight, (loop.index, num_bytes)), num_bytes, AHEAD)
        pairs = [(token, row) for token in a for row in w]
        loop.carried = [fma(b, x, y, total) for (x, y), total in zip(pairs, loop.carried, strict=True)]
    for first in range(0, len(pairs), LANES):
        vectors = loop.results[first : first + LANES]
        sums = sum_lanes(b, vectors + [constant(F32x16, 0.0)] * (LANES - len(vectors)))
        for lane in range(0, len(vectors), num_rows):
            token = (first + lane) // num_rows
            part = shuffle(b, sums, sums, range(lane, lane + num_rows))
            store(b, part, offset(b, out, (out_stride, token)))
