"""The two inner loops of attention, over rows whose length is a multiple of 16, of any number format.

``score``: queries with a run of keys. Sixteen partial sums along the head, added in a fixed order, for one
key as for sixteen, so that a score's bits do not depend on the neighbouring keys.

``gather``: out += weight * value, position after position, each step one fused multiply-add on every number.
A row's chain of additions runs over positions in order, through memory from one run to the next, whatever
other rows are computed at the same time.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types

from octavo_kernels.cpu.attention.cached_rows import STEP_BYTES, emit_row_bytes, load_step
from octavo_kernels.cpu.compiled import Constant, emitted
from octavo_kernels.cpu.vector_ir import (
    F32,
    HAS_AVX512,
    I32,
    LANES,
    F32x16,
    Loop,
    ask_for,
    call,
    constant,
    exp,
    fma,
    halve,
    i64,
    load,
    offset,
    splat,
    store,
    sum_halved,
    sum_one,
)

VECTOR_BYTES = 4 * LANES
STATE_BYTES = VECTOR_BYTES
"""Bytes before the outputs of a part, for its largest score and the sum of its weights."""
LOWEST = -3.0e38
SCORE_ROWS = 3
"""Queries per call of ``score``."""
KEYS_AT_ONCE = 8 if HAS_AVX512 else 2
"""With so many keys the sums of all these queries just fit the registers."""
MAX_ROWS = 4
"""Rows per call of ``gather``. Six would fit, but save little and take a second more to compile."""
WEIGH_ROWS = 4
"""Rows per call of ``exponentials``: a single row would be bound by instruction latency."""
WIDTHS = (4, 1) if HAS_AVX512 else (1,)
"""Vectors of the head that ``gather`` processes at a time, and what is left of it."""


@emitted()
def score(
    b: ir.IRBuilder, number_format: Constant, asks: Constant, queries: ir.Value, query_stride: ir.Value,
    num_rows: ir.Value, keys: ir.Value, num_steps: ir.Value, out: ir.Value, out_stride: ir.Value, ahead: ir.Value,
) -> None:  # fmt: skip
    """Dot products of 1 to SCORE_ROWS queries with 16 keys of a format, which lie one after the other.

    ``num_steps`` vectors each. If ``asks``, as many bytes as are read are prefetched from ``ahead`` on. The first two
    arguments are constants.
    """
    for count in range(1, SCORE_ROWS + 1):
        with b.if_then(b.icmp_signed("==", num_rows, i64(count))):
            rows = [offset(b, queries, (query_stride, row)) for row in range(count)]
            # A few keys at a time, such that the first step of ``sum_lanes`` is among them: the sums fit registers.
            times = range(LANES // KEYS_AT_ONCE)
            found = [_emit_score(b, number_format, bool(asks), rows, keys, num_steps, ahead, time) for time in times]
            for row, parts in enumerate(zip(*found, strict=True)):
                store(b, sum_halved(b, [x for part in parts for x in part]), offset(b, out, (out_stride, row)))


def _emit_score(
    b: ir.IRBuilder,
    number_format: int,
    asks: bool,
    queries: list[ir.Value],
    keys: ir.Value,
    num_steps: ir.Value,
    ahead: ir.Value,
    time: int,
) -> list[list[ir.Value]]:
    """For each query, its partial sums with KEYS_AT_ONCE of the 16 keys, after ``halve``."""
    row_bytes = emit_row_bytes(b, number_format, num_steps)
    pairs = KEYS_AT_ONCE // 2
    chosen = [start + pairs * time + i for start in (0, LANES // 2) for i in range(pairs)]
    rows = [offset(b, keys, (row_bytes, i)) for i in chosen]
    with Loop(b, num_steps, [constant(F32x16, 0.0)] * (len(queries) * len(rows))) as loop:
        q = [load(b, F32x16, offset(b, query, (loop.index, VECTOR_BYTES))) for query in queries]
        totals = list(loop.carried)
        for i, row in enumerate(rows):
            key = load_step(b, number_format, row, num_steps, loop.index)
            for j, query in enumerate(q):
                totals[j * len(rows) + i] = fma(b, query, key, totals[j * len(rows) + i])
        if asks:
            num_bytes = len(rows) * STEP_BYTES[number_format]
            ask_for(b, offset(b, ahead, (row_bytes, time * len(rows)), (loop.index, num_bytes)), num_bytes)
        loop.carried = totals
    return [halve(b, loop.results[j * len(rows) : (j + 1) * len(rows)], LANES // 2) for j in range(len(queries))]


@emitted()
def score_one(
    b: ir.IRBuilder, number_format: Constant, query: ir.Value, key: ir.Value, num_steps: ir.Value, out: ir.Value
) -> None:
    """The dot product of a query with one key of a format, a constant."""
    with Loop(b, num_steps, [constant(F32x16, 0.0)]) as loop:
        q = load(b, F32x16, offset(b, query, (loop.index, VECTOR_BYTES)))
        k = load_step(b, number_format, key, num_steps, loop.index)
        loop.carried = [fma(b, q, k, loop.carried[0])]
    store(b, sum_one(b, loop.results[0]), out)


@emitted()
def gather(
    b: ir.IRBuilder, number_format: Constant, asks: Constant, weights: ir.Value, weight_stride: ir.Value,
    values: ir.Value, num_steps: ir.Value, num_positions: ir.Value, out: ir.Value, out_stride: ir.Value,
    num_rows: ir.Value, ahead: ir.Value,
) -> None:  # fmt: skip
    """Add weighted values of a format to 1 to MAX_ROWS rows of ``out``, ``num_steps`` vectors each.

    Row r is at ``out + out_stride * r``, and its weight of position j at ``weights + weight_stride * r + 4 * j``.
    ``asks`` and ``ahead`` as for ``score``.
    """
    row_bytes = emit_row_bytes(b, number_format, num_steps)
    wide = b.sdiv(num_steps, i64(WIDTHS[0]))
    done = b.mul(wide, i64(WIDTHS[0]))
    firsts, turns_of = (i64(0), done), (wide, b.sub(num_steps, done))
    for rows in range(1, MAX_ROWS + 1):
        with b.if_then(b.icmp_signed("==", num_rows, i64(rows))):
            for width, first, turns in zip(WIDTHS, firsts, turns_of, strict=False):
                with Loop(b, turns, []) as part:
                    step = b.add(first, b.mul(part.index, i64(width)))
                    at = offset(b, out, (step, VECTOR_BYTES))
                    asked = offset(b, ahead, (step, STEP_BYTES[number_format])) if asks else None
                    source = values, row_bytes, num_steps, step, num_positions
                    _emit_gather(b, number_format, rows, width, weights, weight_stride, *source, at, out_stride, asked)


def _emit_gather(
    b: ir.IRBuilder,
    number_format: int,
    num_rows: int,
    width: int,
    weights: ir.Value,
    weight_stride: ir.Value,
    values: ir.Value,
    row_bytes: ir.Value,
    num_steps: ir.Value,
    step: ir.Value,
    num_positions: ir.Value,
    out: ir.Value,
    out_stride: ir.Value,
    ahead: ir.Value | None,
) -> None:
    rows = [offset(b, out, (out_stride, row)) for row in range(num_rows)]
    before = [load(b, F32x16, row, VECTOR_BYTES * i) for row in rows for i in range(width)]
    with Loop(b, num_positions, before) as loop:
        along = b.mul(row_bytes, loop.index)
        row, steps = b.add(values, along), [b.add(step, i64(i)) for i in range(width)]
        value = [load_step(b, number_format, row, num_steps, each) for each in steps]
        at = offset(b, weights, (loop.index, 4))
        weight = [splat(b, load(b, F32, offset(b, at, (weight_stride, row)))) for row in range(num_rows)]
        products = [(w, v) for w in weight for v in value]
        if ahead is not None:
            ask_for(b, b.add(ahead, along), width * STEP_BYTES[number_format])
        loop.carried = [fma(b, w, v, total) for (w, v), total in zip(products, loop.carried, strict=True)]
    for i, total in enumerate(loop.results):
        store(b, total, rows[i // width], VECTOR_BYTES * (i % width))


@emitted()
def exponentials(
    b: ir.IRBuilder,
    scores: ir.Value,
    score_stride: ir.Value,
    num_vectors: ir.Value,
    states: ir.Value,
    state_stride: ir.Value,
) -> None:
    """Replace scores of WEIGH_ROWS rows by e ** (score - largest score of the row).

    The largest score and the sum are stored in each row's state. Masked scores are -inf, which changes no bit of the
    others. The largest score is LOWEST at least, so that a row of -inf gives zeros.
    """
    rows = [offset(b, scores, (score_stride, row)) for row in range(WEIGH_ROWS)]
    with Loop(b, num_vectors, [constant(F32x16, LOWEST)] * WEIGH_ROWS) as loop:
        here = [load(b, F32x16, offset(b, row, (loop.index, VECTOR_BYTES))) for row in rows]
        pairs = zip(loop.carried, here, strict=True)
        loop.carried = [call(b, "llvm.maxnum.v16f32", F32x16, pair) for pair in pairs]
    most = [call(b, "llvm.vector.reduce.fmax.v16f32", F32, [x]) for x in loop.results]
    largest = [splat(b, x) for x in most]
    with Loop(b, num_vectors, [constant(F32x16, 0.0)] * WEIGH_ROWS) as loop:
        sums = []
        for row, x, total in zip(rows, largest, loop.carried, strict=True):
            at = offset(b, row, (loop.index, VECTOR_BYTES))
            weight = exp(b, b.fsub(load(b, F32x16, at), x))
            store(b, weight, at)
            sums.append(b.fadd(total, weight))
        loop.carried = sums
    for i, (x, total) in enumerate(zip(most, loop.results, strict=True)):
        state = offset(b, states, (state_stride, i))
        store(b, x, state)
        store(b, sum_one(b, total), state, 4)


@emitted(cap=types.float32)
def soft_cap(b: ir.IRBuilder, scores: ir.Value, num_vectors: ir.Value, cap: ir.Value) -> None:
    """Scores become cap * tanh(score / cap); tanh y = sign y * (1 - e) / (1 + e) with e = exp(-2 |y|)."""
    cap, one = splat(b, cap), constant(F32x16, 1.0)
    with Loop(b, num_vectors, []) as loop:
        at = offset(b, scores, (loop.index, VECTOR_BYTES))
        y = b.fdiv(load(b, F32x16, at), cap)
        e = exp(b, b.fmul(call(b, "llvm.fabs.v16f32", F32x16, [y]), constant(F32x16, -2.0)))
        tanh = b.fdiv(b.fsub(one, e), b.fadd(one, e))
        store(b, b.fmul(call(b, "llvm.copysign.v16f32", F32x16, [tanh, y]), cap), at)


@emitted()
def merge(b: ir.IRBuilder, total: ir.Value, part: ir.Value, num_steps: ir.Value) -> None:
    """Add a part of a softmax to a total, both ``[largest, sum, ..., outputs]``: the outputs begin at STATE_BYTES."""
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
