"""Activations to int8, one scale for each row and group: what ``block_dot`` multiplies weights with.

For a group x[0..g) of one row::

    scale = max |x| / 127            q = round(x / scale), ties to even, in -127 .. 127

so that |x - scale * q| <= scale / 2 (and a rounding error of 2 ** -16 of that). A few groups hold channels that are
far larger than the others, and most of a row's error. Where a scale is above SECOND_ABOVE times the mean of the
row's, what is left, x - scale * q, is quantised the same way into a second term. A row's terms lie one after the
other: G groups of the first, then G places of the second, with scale and offset 0 where there is none.

A group that holds an infinity or
a NaN gets a scale that is not finite, which makes the row's results so; other rows never see it. A group
below 1e-30 everywhere counts as zero.
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
SECOND_ABOVE = 1.5
"""Between precision and work: lower values give more groups a second term."""


@emitted
def _quantize_group(
    context: Any, group: Any, has_minima: Any, x: Any, q: Any, scale: Any, sums: Any, zero_point: Any
) -> Any:
    """Quantise ``group`` floats at ``x`` into int8 at ``q``, with their scale and offset; see ``quantize_row``."""
    if not isinstance(group, types.IntegerLiteral) or not isinstance(has_minima, types.IntegerLiteral):
        return None
    num_vectors, with_sums = group.literal_value // LANES, bool(has_minima.literal_value)

    def emit(c: Any, b: ir.IRBuilder, _s: Any, args: Any) -> ir.Value:
        _emit_quantize_group(b, num_vectors, with_sums, *args[2:])
        return c.get_dummy_value()

    return types.void(group, has_minima, *([types.intp] * 4), types.int32), emit


def _emit_quantize_group(
    b: ir.IRBuilder,
    num_vectors: int,
    with_sums: bool,
    x: ir.Value,
    q: ir.Value,
    scale: ir.Value,
    sums: ir.Value,
    zero_point: ir.Value,
) -> None:
    vectors = [load(b, F32x16, x, 4 * LANES * i) for i in range(num_vectors)]
    # The bits of |x|, as integers, sort like the numbers, and NaN sorts above all of them.
    largest = constant(I32x16, 0)
    for vector in vectors:
        bits = b.and_(b.bitcast(vector, I32x16), constant(I32x16, 0x7FFFFFFF))
        largest = call(b, "llvm.umax.v16i32", I32x16, [largest, bits])
    amax = b.bitcast(call(b, "llvm.vector.reduce.umax.v16i32", I32, [largest]), F32)
    step = b.fdiv(amax, ir.Constant(F32, LARGEST))
    inverse = b.fdiv(ir.Constant(F32, LARGEST), amax)
    is_tiny = b.fcmp_ordered("<", amax, ir.Constant(F32, TINY))
    step = b.select(is_tiny, ir.Constant(F32, 0.0), step)
    inverse = splat(b, b.select(is_tiny, ir.Constant(F32, 0.0), inverse))
    total = constant(I32x16, 0)
    for i, vector in enumerate(vectors):
        # Adding 1.5 * 2 ** 23 rounds, and leaves the whole number in the low bits. What is not finite gives any number.
        shifted = b.fadd(b.fmul(vector, inverse), constant(F32x16, ROUNDER))
        whole = b.sub(b.bitcast(shifted, I32x16), b.bitcast(constant(F32x16, ROUNDER), I32x16))
        store(b, b.trunc(whole, ir.VectorType(I8, LANES)), q, LANES * i)
        total = b.add(total, whole)
    total = call(b, "llvm.vector.reduce.add.v16i32", I32, [total])
    store(b, step, scale)
    store(b, b.fmul(b.sitofp(total, F32), step) if with_sums else b.mul(total, b.neg(zero_point)), sums)


@compiled
def quantize_term(group: int, has_minima: int, x: int, q: int, scale: int, offset: int, zero_point: int) -> None:
    """One term of one group; all but ``group``, the flag and the zero point are addresses."""
    if group == 32:
        if has_minima:
            _quantize_group(32, 1, x, q, scale, offset, zero_point)
        else:
            _quantize_group(32, 0, x, q, scale, offset, zero_point)
    else:
        _quantize_group(16, 0, x, q, scale, offset, zero_point)


@compiled
def quantize_row(
    group: int, has_minima: int, x: int, rest: int, q: int, scales: int, offsets: int, zero_point: int, num_groups: int
) -> None:
    """Quantise the ``num_groups`` groups of a row at ``x`` into two terms; ``rest`` is room for a group of float32.

    ``q`` int8, ``scales`` float32 and ``offsets`` get what ``block_dot`` takes, of both terms: scale * sum(q) as
    float32 for weights with minima, else -zero_point * sum(q) as int32. Where there is no second term, its ``q``
    stays as it was.
    """
    total = np.float32(0.0)
    steps = view(scales, 2 * num_groups, np.float32)
    for g in range(num_groups):
        side = 4 * g
        quantize_term(group, has_minima, x + 4 * group * g, q + group * g, scales + side, offsets + side, zero_point)
        total += steps[g]
    limit = np.float32(SECOND_ABOVE) * (total / np.float32(num_groups))
    zeros, left = view(offsets, 2 * num_groups, np.int32), view(rest, group, np.float32)
    for g in range(num_groups):
        second = num_groups + g
        if steps[g] > limit:
            numbers, rounded = view(x + 4 * group * g, group, np.float32), view(q + group * g, group, np.int8)
            for k in range(group):
                left[k] = numbers[k] - steps[g] * np.float32(rounded[k])
            side = 4 * second
            quantize_term(group, has_minima, rest, q + group * second, scales + side, offsets + side, zero_point)
        else:
            steps[second] = np.float32(0.0)
            zeros[second] = np.int32(0)
