"""The two inner loops of attention, over float32 rows whose length is a multiple of 16.

``score``: a query with a run of keys. Sixteen partial sums along the head, added up in a fixed order, for one
key as for sixteen, so that a score's bits do not depend on which keys lie beside it.

``gather``: out += weight * value, position after position, each step one fused multiply-add on every number.
A row's chain of additions runs over positions in order, through memory from one run to the next, whatever
other rows are computed beside it.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types

from octavo.ops.cpu.compiled import emitted
from octavo.ops.cpu.vector_ir import (
    F32,
    LANES,
    F32x16,
    Loop,
    call,
    constant,
    exp,
    fma,
    i64,
    load,
    offset,
    splat,
    store,
    sum_lanes,
    sum_one,
)

VECTOR_BYTES = 4 * LANES
MAX_ROWS = 6
WIDTHS = (4, 1)
"""Vectors of the head that ``gather`` takes at a time; 6 rows of 4 just fit the registers."""


@emitted
def score(context: Any, query: Any, keys: Any, num_steps: Any, out: Any, num_keys: Any) -> Any:
    """Dot products of a query with 16 keys or 1, which lie one after the other; ``num_steps`` vectors each."""

    def emit(c: Any, b: ir.IRBuilder, _s: Any, args: Any) -> ir.Value:
        query, keys, num_steps, out, num_keys = args
        for count in (LANES, 1):
            with b.if_then(b.icmp_signed("==", num_keys, i64(count))):
                row_bytes = b.mul(num_steps, i64(VECTOR_BYTES))
                rows = [offset(b, keys, (row_bytes, i)) for i in range(count)]
                with Loop(b, num_steps, [constant(F32x16, 0.0)] * count) as loop:
                    along = b.mul(loop.index, i64(VECTOR_BYTES))
                    q = load(b, F32x16, b.add(query, along))
                    pairs = zip(rows, loop.carried, strict=True)
                    loop.carried = [fma(b, q, load(b, F32x16, b.add(row, along)), total) for row, total in pairs]
                sums = loop.results
                store(b, sum_lanes(b, sums) if count == LANES else sum_one(b, sums[0]), out)
        return c.get_dummy_value()

    return types.void(*([types.intp] * 5)), emit


@emitted
def gather(
    context: Any,
    weights: Any,
    weight_stride: Any,
    values: Any,
    num_steps: Any,
    num_positions: Any,
    out: Any,
    num_rows: Any,
) -> Any:
    """Add weighted values to 1 to MAX_ROWS rows of ``out``; values and rows are ``num_steps`` vectors each.

    Row r's weight of position j is at ``weights + weight_stride * r + 4 * j``.
    """

    def emit(c: Any, b: ir.IRBuilder, _s: Any, args: Any) -> ir.Value:
        weights, weight_stride, values, num_steps, num_positions, out, num_rows = args
        row_bytes = b.mul(num_steps, i64(VECTOR_BYTES))
        wide = b.sdiv(num_steps, i64(WIDTHS[0]))
        done = b.mul(wide, i64(WIDTHS[0]))
        for rows in range(1, MAX_ROWS + 1):
            with b.if_then(b.icmp_signed("==", num_rows, i64(rows))):
                for width, first, turns in ((WIDTHS[0], i64(0), wide), (1, done, b.sub(num_steps, done))):
                    with Loop(b, turns, []) as part:
                        at = b.mul(b.add(first, b.mul(part.index, i64(width))), i64(VECTOR_BYTES))
                        places = weights, weight_stride, b.add(values, at), row_bytes, num_positions, b.add(out, at)
                        _emit_gather(b, rows, width, *places)
        return c.get_dummy_value()

    return types.void(*([types.intp] * 7)), emit


def _emit_gather(
    b: ir.IRBuilder,
    num_rows: int,
    width: int,
    weights: ir.Value,
    weight_stride: ir.Value,
    values: ir.Value,
    row_bytes: ir.Value,
    num_positions: ir.Value,
    out: ir.Value,
) -> None:
    rows = [offset(b, out, (row_bytes, row)) for row in range(num_rows)]
    before = [load(b, F32x16, row, VECTOR_BYTES * i) for row in rows for i in range(width)]
    with Loop(b, num_positions, before) as loop:
        value_row = b.add(values, b.mul(row_bytes, loop.index))
        value = [load(b, F32x16, value_row, VECTOR_BYTES * i) for i in range(width)]
        at = offset(b, weights, (loop.index, 4))
        weight = [splat(b, load(b, F32, offset(b, at, (weight_stride, row)))) for row in range(num_rows)]
        products = [(w, v) for w in weight for v in value]
        loop.carried = [fma(b, w, v, total) for (w, v), total in zip(products, loop.carried, strict=True)]
    for i, total in enumerate(loop.results):
        store(b, total, rows[i // width], VECTOR_BYTES * (i % width))


@emitted
def exponentials(context: Any, scores: Any, num_vectors: Any) -> Any:
    """Replace scores by e ** (score - largest score), and give their sum; the fill of a last vector is -inf."""

    def emit(_c: Any, b: ir.IRBuilder, _s: Any, args: Any) -> ir.Value:
        scores, num_vectors = args
        lowest = constant(F32x16, float("-inf"))
        with Loop(b, num_vectors, [lowest]) as loop:
            here = load(b, F32x16, offset(b, scores, (loop.index, VECTOR_BYTES)))
            loop.carried = [call(b, "llvm.maxnum.v16f32", F32x16, [loop.carried[0], here])]
        largest = splat(b, call(b, "llvm.vector.reduce.fmax.v16f32", F32, [loop.results[0]]))
        with Loop(b, num_vectors, [constant(F32x16, 0.0)]) as loop:
            at = offset(b, scores, (loop.index, VECTOR_BYTES))
            weight = exp(b, b.fsub(load(b, F32x16, at), largest))
            store(b, weight, at)
            loop.carried = [b.fadd(loop.carried[0], weight)]
        return sum_one(b, loop.results[0])

    return types.float32(types.intp, types.intp), emit
