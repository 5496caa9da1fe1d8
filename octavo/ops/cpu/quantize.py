"""Activations to int8, one scale for each row and group: what ``block_dot`` multiplies weights with.

For a group x[0..g) of one row::

    scale = max |x| / 127            q = round(127 x / max |x|), ties to even, in -127 .. 127

so that |x - scale * q| <= scale / 2 (and a rounding error of 2 ** -13 of that). A few groups hold channels that are
far larger than the others, and would have most of a row's error. Where a scale is above LARGE_ABOVE times the mean of
the row's, numbers that are too large for that are taken out first, in the same way but with the group's scale, and the
group's term is made of what is left: all of it for the others, at most scale / 2 for those. What was taken out of four
neighbours at a time is a *large part*, of which there are few. A row has room for two a group, and eight; groups that
find none are rounded as they are.

A term lies in memory with all that is multiplied with it::

    q int8 [g], scale float32, start float32, offset float32 or int32, 4 bytes of nothing

``start`` is -ROUNDER * scale, exactly: the scale has two bits less than a float32. ``block_dot`` counts in the low bits
of the float32 number ROUNDER, so that one fma(count, scale, start) is the product of the whole number and the scale,
rounded once. ``offset`` is scale * sum(q) for weights with minima, large parts included, else the int32 that the count
starts from: the bits of ROUNDER - zero_point * sum(q). A large part is, in the same sense::

    q int8 [4], scale float32, start float32, the count's start int32, group int32, its four of the group's int32

A group that holds an infinity or a NaN, or numbers above 3e33, gets a scale or a start that is not finite, which makes
the row's results so; other rows never see it. A group below 1e-30 everywhere counts as zero.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types

from octavo.ops.cpu.compiled import compiled, emitted, inlined
from octavo.ops.cpu.memory import float_bits, int_bits, view
from octavo.ops.cpu.vector_ir import F32, I8, I32, LANES, F32x16, I32x16, call, constant, fma, load, splat, store

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
LARGE_ABOVE = 1.5
"""Between precision and work: lower values give more groups large parts."""
PART_WORDS = 6
"""Of a large part, four bytes each."""


@inlined
def room_for_parts(G: int) -> int:
    """Most large parts of a row of G groups."""
    return 2 * G + 8


@emitted
def _largest(context: Any, group: Any, x: Any) -> Any:
    """The largest |x| of a group; the bits of |x|, as integers, sort like the numbers, and NaN sorts above all."""
    if not isinstance(group, types.IntegerLiteral):
        return None
    num_vectors = group.literal_value // LANES

    def emit(c: Any, b: ir.IRBuilder, _s: Any, args: Any) -> ir.Value:
        largest = constant(I32x16, 0)
        for i in range(num_vectors):
            bits = b.and_(load(b, I32x16, args[1], 4 * LANES * i), constant(I32x16, 0x7FFFFFFF))
            largest = call(b, "llvm.umax.v16i32", I32x16, [largest, bits])
        return b.bitcast(call(b, "llvm.vector.reduce.umax.v16i32", I32, [largest]), F32)

    return types.float32(group, types.intp), emit


def _rounded(b: ir.IRBuilder, x: ir.Value, inverse: ir.Value) -> ir.Value:
    """Whole numbers nearest to x * inverse. What is not finite gives any number."""
    # Adding 1.5 * 2 ** 23 rounds, and leaves the whole number in the low bits.
    shifted = b.fadd(b.fmul(x, inverse), constant(F32x16, ROUNDER))
    return b.sub(b.bitcast(shifted, I32x16), b.bitcast(constant(F32x16, ROUNDER), I32x16))


@emitted
def _round_group(
    context: Any, group: Any, has_minima: Any, x: Any, term: Any, step: Any, inverse: Any, zero_point: Any, more: Any
) -> Any:
    """Quantise ``group`` floats at ``x`` into a term; ``more`` is added to the sum that minima are multiplied with."""
    if not isinstance(group, types.IntegerLiteral) or not isinstance(has_minima, types.IntegerLiteral):
        return None
    num_vectors, has_sums = group.literal_value // LANES, bool(has_minima.literal_value)

    def emit(c: Any, b: ir.IRBuilder, _s: Any, args: Any) -> ir.Value:
        x, term, step, inverse, zero_point, more = args[2:]
        total, factor = constant(I32x16, 0), splat(b, inverse)
        for i in range(num_vectors):
            whole = _rounded(b, load(b, F32x16, x, 4 * LANES * i), factor)
            store(b, b.trunc(whole, ir.VectorType(I8, LANES)), term, LANES * i)
            total = b.add(total, whole)
        total = call(b, "llvm.vector.reduce.add.v16i32", I32, [total])
        side = num_vectors * LANES
        store(b, step, term, side)
        store(b, b.fmul(step, ir.Constant(F32, -ROUNDER)), term, side + START)
        start = b.sub(ir.Constant(I32, ROUNDER_BITS), b.mul(total, zero_point))
        x_sum = b.fadd(b.fmul(b.sitofp(total, F32), step), more)
        store(b, x_sum if has_sums else start, term, side + OFFSET)
        return c.get_dummy_value()

    floats = types.float32, types.float32, types.int32, types.float32
    return types.void(group, has_minima, types.intp, types.intp, *floats), emit


@emitted
def _take_large(context: Any, group: Any, x: Any, limit: Any, step: Any, inverse: Any, rest: Any, taken: Any) -> Any:
    """What of ``group`` floats is above ``limit``, rounded, to int8 at ``taken``; what is left to ``rest``."""
    if not isinstance(group, types.IntegerLiteral):
        return None
    num_vectors = group.literal_value // LANES

    def emit(c: Any, b: ir.IRBuilder, _s: Any, args: Any) -> ir.Value:
        x, limit, step, inverse, rest, taken = args[1:]
        limit, step, inverse = splat(b, limit), splat(b, b.fneg(step)), splat(b, inverse)
        for i in range(num_vectors):
            vector = load(b, F32x16, x, 4 * LANES * i)
            is_large = b.fcmp_ordered(">", call(b, "llvm.fabs.v16f32", F32x16, [vector]), limit)
            whole = b.select(is_large, _rounded(b, vector, inverse), constant(I32x16, 0))
            store(b, b.trunc(whole, ir.VectorType(I8, LANES)), taken, LANES * i)
            store(b, fma(b, b.sitofp(whole, F32x16), step, vector), rest, 4 * LANES * i)
        return c.get_dummy_value()

    return types.void(group, types.intp, *[types.float32] * 3, types.intp, types.intp), emit


@inlined
def _scale(largest: Any) -> Any:
    """The scale of a group and one over it."""
    if largest < np.float32(TINY):
        return np.float32(0), np.float32(0)
    step = largest / np.float32(LARGEST)
    return float_bits(np.int32(int_bits(step) & ~3)), np.float32(LARGEST) / largest


@inlined
def _list_parts(group: int, taken: int, step: Any, zero_point: int, g: int, parts: int, n: int) -> Any:
    """Write large parts of group ``g`` down, from the ``n``th on; gives their number then, and the sum of all taken."""
    numbers, fours = view(taken, group, np.int8), view(taken, group // 4, np.int32)
    words, floats = view(parts, (n + group) * PART_WORDS, np.int32), view(parts, (n + group) * PART_WORDS, np.float32)
    total = 0
    for i in range(group // 4):
        if fours[i] != 0:
            here = int(numbers[4 * i]) + numbers[4 * i + 1] + numbers[4 * i + 2] + numbers[4 * i + 3]
            at = n * PART_WORDS
            words[at], floats[at + 1], floats[at + 2] = fours[i], step, np.float32(-ROUNDER) * step
            words[at + 3], words[at + 4], words[at + 5] = ROUNDER_BITS - zero_point * here, g, i
            n, total = n + 1, total + here
    return n, total


@inlined
def _quantize_row(
    group: int, has_minima: int, x: int, firsts: int, parts: int, zero_point: int, G: int, scales: Any, rest: int
) -> Any:
    total, num_parts, none = np.float32(0), 0, np.float32(0)
    for g in range(G):
        scales[0, g] = _largest(group, x + 4 * group * g)
    for g in range(G):
        scales[0, g], scales[1, g] = _scale(scales[0, g])
    for g in range(G):
        total += scales[0, g]
    limit = np.float32(LARGE_ABOVE) * (total / np.float32(G))
    for g in range(G):
        at, term = x + 4 * group * g, firsts + TOKENS_TOGETHER * (group + SIDE_BYTES) * g
        step, inverse = scales[0, g], scales[1, g]
        if step > limit and num_parts + group // 4 <= room_for_parts(G):
            taken = rest + 4 * group
            _take_large(group, at, np.float32(LARGEST) * limit, step, inverse, rest, taken)
            num_parts, whole = _list_parts(group, taken, step, zero_point, g, parts, num_parts)
            more, (step, inverse) = np.float32(whole) * step, _scale(_largest(group, rest))
            _round_group(group, has_minima, rest, term, step, inverse, np.int32(zero_point), more)
        else:
            _round_group(group, has_minima, at, term, step, inverse, np.int32(zero_point), none)
    return num_parts


@compiled
def quantize_row(
    group: int, has_minima: int, x: int, firsts: int, parts: int, zero_point: int, G: int, scales: Any, rest: int
) -> Any:
    """Quantise the ``G`` groups of a row at ``x`` into terms, which lie beside those of other rows.

    Large parts are listed from ``parts`` on, group by group; gives their number. There has to be room for float32
    ``scales`` [2, G], and at ``rest`` for ``group`` float32 and as many bytes.
    """
    if group == 16:
        return _quantize_row(16, 0, x, firsts, parts, zero_point, G, scales, rest)
    if has_minima:
        return _quantize_row(32, 1, x, firsts, parts, zero_point, G, scales, rest)
    return _quantize_row(32, 0, x, firsts, parts, zero_point, G, scales, rest)
