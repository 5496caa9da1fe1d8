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
    I32,
    LANES,
    F32x16,
    Loop,
    ask_for,
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
STATE_BYTES = VECTOR_BYTES
"""In front of the outputs of a part: its largest score and the sum of its weights."""
LOWEST = -3.0e38
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
    out_stride: Any,
    num_rows: Any,
) -> Any:
    """Add weighted values to 1 to MAX_ROWS rows of ``out``; values and rows are ``num_steps`` vectors each.

    Row r is at ``out + out_stride * r``, and its weight of position j at ``weights + weight_stride * r + 4 * j``.
    """

    def emit(c: Any, b: ir.IRBuilder, _s: Any, args: Any) -> ir.Value:
        weights, weight_stride, values, num_steps, num_positions, out, out_stride, num_rows = args
        row_bytes = b.mul(num_steps, i64(VECTOR_BYTES))
        wide = b.sdiv(num_steps, i64(WIDTHS[0]))
        done = b.mul(wide, i64(WIDTHS[0]))
        for rows in range(1, MAX_ROWS + 1):
            with b.if_then(b.icmp_signed("==", num_rows, i64(rows))):
                for width, first, turns in ((WIDTHS[0], i64(0), wide), (1, done, b.sub(num_steps, done))):
                    with Loop(b, turns, []) as part:
                        at = b.mul(b.add(first, b.mul(part.index, i64(width))), i64(VECTOR_BYTES))
                        places = b.add(values, at), row_bytes, num_positions, b.add(out, at), out_stride
                        _emit_gather(b, rows, width, weights, weight_stride, *places)
        return c.get_dummy_value()

    return types.void(*([types.intp] * 8)), emit


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
    out_stride: ir.Value,
) -> None:
    rows = [offset(b, out, (out_stride, row)) for row in range(num_rows)]
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
def exponentials(context: Any, scores: Any, num_vectors: Any, state: Any) -> Any:
    """Replace scores by e ** (score - largest score); put the largest and the sum at ``state``.

    What is not to count is -inf. The largest is LOWEST at least, so that a row of -inf gives zeros.
    """

    def emit(c: Any, b: ir.IRBuilder, _s: Any, args: Any) -> ir.Value:
        scores, num_vectors, state = args
        with Loop(b, num_vectors, [constant(F32x16, LOWEST)]) as loop:
            here = load(b, F32x16, offset(b, scores, (loop.index, VECTOR_BYTES)))
            loop.carried = [call(b, "llvm.maxnum.v16f32", F32x16, [loop.carried[0], here])]
        most = call(b, "llvm.vector.reduce.fmax.v16f32", F32, [loop.results[0]])
        largest = splat(b, most)
        with Loop(b, num_vectors, [constant(F32x16, 0.0)]) as loop:
            at = offset(b, scores, (loop.index, VECTOR_BYTES))
            weight = exp(b, b.fsub(load(b, F32x16, at), largest))
            store(b, weight, at)
            loop.carried = [b.fadd(loop.carried[0], weight)]
        store(b, most, state)
        store(b, sum_one(b, loop.results[0]), state, 4)
        return c.get_dummy_value()

    return types.void(*([types.intp] * 3)), emit


@emitted
def soft_cap(context: Any, scores: Any, num_vectors: Any, cap: Any) -> Any:
    """Scores become cap * tanh(score / cap); tanh y = sign y * (1 - e) / (1 + e) with e = exp(-2 |y|)."""

    def emit(c: Any, b: ir.IRBuilder, _s: Any, args: Any) -> ir.Value:
        scores, num_vectors, cap = args
        cap, one = splat(b, cap), constant(F32x16, 1.0)
        with Loop(b, num_vectors, []) as loop:
            at = offset(b, scores, (loop.index, VECTOR_BYTES))
            y = b.fdiv(load(b, F32x16, at), cap)
            e = exp(b, b.fmul(call(b, "llvm.fabs.v16f32", F32x16, [y]), constant(F32x16, -2.0)))
            tanh = b.fdiv(b.fsub(one, e), b.fadd(one, e))
            store(b, b.fmul(call(b, "llvm.copysign.v16f32", F32x16, [tanh, y]), cap), at)
        return c.get_dummy_value()

    return types.void(types.intp, types.intp, types.float32), emit


@emitted
def merge(context: Any, total: Any, part: Any, num_steps: Any) -> Any:
    """Add a part of a softmax to a total, both ``[largest, sum, ..., outputs]``: the outputs begin at STATE_BYTES."""

    def emit(c: Any, b: ir.IRBuilder, _s: Any, args: Any) -> ir.Value:
        total, part, num_steps = args
        before, here = load(b, F32, total), load(b, F32, part)
        largest = call(b, "llvm.maxnum.f32", F32, [before, here])
        shrink, weight = (exp(b, splat(b, b.fsub(x, largest))) for x in (before, here))
        zero = ir.Constant(I32, 0)
        sums = b.fmul(splat(b, load(b, F32, total, 4)), shrink)
        sums = fma(b, splat(b, load(b, F32, part, 4)), weight, sums)
        store(b, largest, total)
        store(b, b.extract_element(sums, zero), total, 4)
        with Loop(b, num_steps, []) as loop:
            at, more = (offset(b, x, (loop.index, VECTOR_BYTES)) for x in (total, part))
            old = b.fmul(load(b, F32x16, at, STATE_BYTES), shrink)
            store(b, fma(b, load(b, F32x16, more, STATE_BYTES), weight, old), at, STATE_BYTES)
        return c.get_dummy_value()

    return types.void(*([types.intp] * 3)), emit


@emitted
def prefetch(context: Any, address: Any, num_lines: Any) -> Any:
    """Ask for cache lines that will be read soon."""

    def emit(c: Any, b: ir.IRBuilder, _s: Any, args: Any) -> ir.Value:
        with Loop(b, args[1], []) as loop:
            ask_for(b, offset(b, args[0], (loop.index, VECTOR_BYTES)))
        return c.get_dummy_value()

    return types.void(types.intp, types.intp), emit
