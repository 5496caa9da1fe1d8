"""Activations to int8, one scale for each row and group: what ``block_dot`` multiplies weights with.

For a group x[0..g) of one row::

    scale = max |x| / 127            q = round(x / scale), ties to even, in -127 .. 127

so that |x - scale * q| <= scale / 2 (and a rounding error of 2 ** -16 of that). A group that holds an infinity or
a NaN gets a scale that is not finite, which makes the row's results so; other rows never see it. A group
below 1e-30 everywhere counts as zero.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types

from octavo.ops.cpu.compiled import compiled, emitted
from octavo.ops.cpu.vector_ir import F32, I8, I32, LANES, F32x16, I32x16, call, constant, load, splat, store

LARGEST = 127.0
TINY = 1e-30
ROUNDER = 12582912.0


@emitted
def _quantize_group(
    context: Any, group: Any, has_minima: Any, x: Any, q: Any, scale: Any, sums: Any, zero_point: Any
) -> Any:
    """Quantise ``group`` floats at ``x`` into int8 at ``q``, with their scale and offset; see ``quantize_rows``."""
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
def quantize_rows(
    group: int, has_minima: int, x: int, q: int, scales: int, offsets: int, zero_point: int, num_groups: int
) -> None:
    """Quantise ``num_groups`` groups that lie one after the other; rows need no separate treatment.

    ``q`` int8, ``scales`` float32 and ``offsets`` get what ``block_dot`` takes: scale * sum(q) as float32 for
    weights with minima, else -zero_point * sum(q) as int32. All but ``group`` and the flag are addresses.
    """
    for g in range(num_groups):
        at = x + 4 * group * g
        if group == 32:
            if has_minima:
                _quantize_group(32, 1, at, q + group * g, scales + 4 * g, offsets + 4 * g, zero_point)
            else:
                _quantize_group(32, 0, at, q + group * g, scales + 4 * g, offsets + 4 * g, zero_point)
        else:
            _quantize_group(16, 0, at, q + group * g, scales + 4 * g, offsets + 4 * g, zero_point)
