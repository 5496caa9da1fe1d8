"""Activations to int8, one scale for each row and group: what ``block_dot`` multiplies weights with.

For a group x[0..g) of one row::

    scale = max |x| / 127            q = round(127 x / max |x|), ties to even, in -127 .. 127

so that |x - scale * q| <= scale / 2 (and a rounding error of 2 ** -13 of that). A few groups hold channels that are
far larger than the others, and most of a row's error. Where a scale is above SECOND_ABOVE times the mean of the
row's, what is left, x - scale * q, is quantised the same way into a second term.

A term lies in memory with all that is multiplied with it::

    q int8 [g], scale float32, start float32, offset float32 or int32, 4 bytes of nothing

``start`` is -ROUNDER * scale, exactly: the scale has two bits less than a float32. ``block_dot`` counts in the low bits
of the float32 number ROUNDER, so that one fma(count, scale, start) is the product of the whole number and the scale,
rounded once. ``offset`` is scale * sum(q) for weights with minima, else the int32 that the count starts from: the
bits of ROUNDER - zero_point * sum(q).

A group that holds an infinity or a NaN, or numbers above 3e33, gets a scale or a start that is not finite, which makes
the row's results so; other rows never see it. A group below 1e-30 everywhere counts as zero.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types

from octavo.ops.cpu.compiled import compiled, emitted
from octavo.ops.cpu.memory import view
from octavo.ops.cpu.vector_ir import F32, I8, I32, LANES, F32x16, I32x16, call, constant, load, splat, store

LARGEST = 127.0
TINY = 1e-30
ROUNDER = 12582912.0
"""1.5 * 2 ** 23: the whole numbers from -2 ** 22 to 2 ** 22 added to it are added to its bits."""
ROUNDER_BITS = 0x4B400000
SIDE_BYTES = 16
"""Of a term, behind its numbers."""
START, OFFSET = 4, 8
"""Where they are in there, behind the scale."""
TOKENS_TOGETHER = 6
"""Rows whose terms lie together: first terms are [T / 6][G][6 rows], so that a few rows are read from one place."""
SECOND_ABOVE = 1.5
"""Between precision and work: lower values give more groups a second term."""


@emitted
def _quantize_group(context: Any, group: Any, has_minima: Any, x: Any, term: Any, zero_point: Any) -> Any:
    """Quantise ``group`` floats at ``x`` into a term."""
    if not isinstance(group, types.IntegerLiteral) or not isinstance(has_minima, types.IntegerLiteral):
        return None
    num_vectors, has_sums = group.literal_value // LANES, bool(has_minima.literal_value)

    def emit(c: Any, b: ir.IRBuilder, _s: Any, args: Any) -> ir.Value:
        _emit_quantize_group(b, num_vectors, has_sums, *args[2:])
        return c.get_dummy_value()

    return types.void(group, has_minima, types.intp, types.intp, types.int32), emit


def _emit_quantize_group(
    b: ir.IRBuilder, num_vectors: int, has_minima: bool, x: ir.Value, term: ir.Value, zero_point: ir.Value
) -> None:
    vectors = [load(b, F32x16, x, 4 * LANES * i) for i in range(num_vectors)]
    # The bits of |x|, as integers, sort like the numbers, and NaN sorts above all of them.
    largest = constant(I32x16, 0)
    for vector in vectors:
        bits = b.and_(b.bitcast(vector, I32x16), constant(I32x16, 0x7FFFFFFF))
        largest = call(b, "llvm.umax.v16i32", I32x16, [largest, bits])
    amax = b.bitcast(call(b, "llvm.vector.reduce.umax.v16i32", I32, [largest]), F32)
    step = b.fdiv(amax, ir.Constant(F32, LARGEST))
    step = b.bitcast(b.and_(b.bitcast(step, I32), ir.Constant(I32, ~3)), F32)
    inverse = b.fdiv(ir.Constant(F32, LARGEST), amax)
    is_tiny = b.fcmp_ordered("<", amax, ir.Constant(F32, TINY))
    step = b.select(is_tiny, ir.Constant(F32, 0.0), step)
    inverse = splat(b, b.select(is_tiny, ir.Constant(F32, 0.0), inverse))
    total = constant(I32x16, 0)
    for i, vector in enumerate(vectors):
        # Adding 1.5 * 2 ** 23 rounds, and leaves the whole number in the low bits. What is not finite gives any number.
        shifted = b.fadd(b.fmul(vector, inverse), constant(F32x16, ROUNDER))
        whole = b.sub(b.bitcast(shifted, I32x16), b.bitcast(constant(F32x16, ROUNDER), I32x16))
        store(b, b.trunc(whole, ir.VectorType(I8, LANES)), term, LANES * i)
        total = b.add(total, whole)
    total = call(b, "llvm.vector.reduce.add.v16i32", I32, [total])
    side = num_vectors * LANES
    store(b, step, term, side)
    store(b, b.fmul(step, ir.Constant(F32, -ROUNDER)), term, side + START)
    start = b.sub(ir.Constant(I32, ROUNDER_BITS), b.mul(total, zero_point))
    store(b, b.fmul(b.sitofp(total, F32), step) if has_minima else start, term, side + OFFSET)


@compiled
def quantize_term(group: int, has_minima: int, x: int, term: int, zero_point: int) -> None:
    """One term of one group; ``x`` and ``term`` are addresses."""
    if group == 32:
        if has_minima:
            _quantize_group(32, 1, x, term, zero_point)
        else:
            _quantize_group(32, 0, x, term, zero_point)
    else:
        _quantize_group(16, 0, x, term, zero_point)


@compiled
def quantize_row(
    group: int, has_minima: int, x: int, rest: int, firsts: int, seconds: int, marks: int, zero_point: int, G: int
) -> None:
    """Quantise the ``G`` groups of a row at ``x`` into terms; ``rest`` is room for a group of float32.

    There is a first term for each group, beside those of other rows, and a second one where ``marks`` int8 [G] gets 1.
    """
    total, term_bytes = np.float32(0.0), group + SIDE_BYTES
    first_bytes = TOKENS_TOGETHER * term_bytes
    words = first_bytes // 4
    steps = view(firsts + group, G * words, np.float32)
    for g in range(G):
        quantize_term(group, has_minima, x + 4 * group * g, firsts + first_bytes * g, zero_point)
        total += steps[g * words]
    limit = np.float32(SECOND_ABOVE) * (total / np.float32(G))
    marked, left = view(marks, G, np.int8), view(rest, group, np.float32)
    for g in range(G):
        step = steps[g * words]
        marked[g] = step > limit
        if step > limit:
            numbers, rounded = (
                view(x + 4 * group * g, group, np.float32),
                view(firsts + first_bytes * g, group, np.int8),
            )
            for k in range(group):
                left[k] = numbers[k] - step * np.float32(rounded[k])
            quantize_term(group, has_minima, rest, seconds + term_bytes * g, zero_point)
