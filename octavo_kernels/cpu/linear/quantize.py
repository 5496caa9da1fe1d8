"""Quantises activations to int8, one scale for each row and group, for ``block_dot``.

For a group x[0..g) of one row::

    scale = max |x| / 127            q = round(127 x / max |x|), ties to even, in -127 .. 127

so that |x - scale * q| <= scale / 2 (and a rounding error of 2 ** -13 of that). A few groups hold outlier channels that
are far larger than the others, and would cause most of a row's error. Where a scale is above LARGE_ABOVE times the
row's mean, larger numbers are first quantised separately, in the same way but with the group's scale, and the group's
term quantises the remainder: all of the other numbers, and at most scale / 2 of those. The separate values of four
neighbours are a *large part*, of which there are few. A row has room for two per group, and eight; groups without room
are quantised as usual.

A term is stored with all factors of its product::

    q int8 [g], scale float32, start float32, offset float32 or int32, 4 bytes of padding

A group may join several groups of the weight, with minima and multiples of their own. Behind the padding there is then
an offset for each: scale * sum(q) likewise, else -zero_point * sum(q).

``start`` is -ROUNDER * scale, exactly: the scale has two bits less than a float32. ``block_dot`` counts in the low bits
of the float32 number ROUNDER, so that one fma(count, scale, start) is the product of the integer and the scale, rounded
once. ``offset`` is scale * sum(q) for weights with minima, large parts included, else the int32 that the count starts
from: the bits of ROUNDER - zero_point * sum(q). A large part is, likewise::

    q int8 [4], scale float32, start float32, the count's start int32, group int32, index of the four in it int32

A group that holds an infinity or a NaN, or numbers above 3e33, gets a scale that is no number, which makes the row's
results no numbers; other rows are unaffected. A group below 1e-30 everywhere counts as zero.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types

from octavo_kernels.cpu.compiled import compiled, emitted, inlined
from octavo_kernels.cpu.memory import float_bits, int_bits, view
from octavo_kernels.cpu.vector_ir import (
    F32,
    I8,
    I32,
    LANES,
    F32x16,
    I32x16,
    Loop,
    call,
    constant,
    fma,
    load,
    offset,
    splat,
    store,
)

LARGEST = 127.0
TINY = 1e-30
ROUNDER = 12582912.0
"""1.5 * 2 ** 23: adding an integer from -2 ** 22 to 2 ** 22 adds it to the number's bits."""
ROUNDER_BITS = 0x4B400000
SIDE_BYTES = 16
"""Bytes of a term behind its numbers."""
START, OFFSET, OFFSETS = 4, 8, 16
"""Byte offsets of these fields there, behind the scale; the last are those of joined groups."""
TOKENS_TOGETHER = 12
"""Rows whose terms are interleaved: first terms are [T / 12][G][12 rows], so that a few rows are read contiguously."""
LARGE_ABOVE = 1.5
"""Trade-off between precision and work: lower values give more groups large parts."""
LARGEST_MULTIPLE = 32
"""Of the scales of joined groups: numbers of up to 4 above or below the zero point become bytes then."""
PART_WORDS = 6
"""Words of a large part, four bytes each."""


@inlined
def term_bytes(group: int, joined: int) -> int:
    """Bytes of a term of ``group`` numbers, and of as many groups of the weight."""
    return group + SIDE_BYTES * (1 + (joined > 1))


@inlined
def zero_of_bytes(zero_point: int, joined: int) -> int:
    """The zero point of a group's numbers as they are multiplied; see ``block_scales.times_multiple``."""
    return zero_point * (LARGEST_MULTIPLE if joined > 1 else 1)


@inlined
def room_for_parts(G: int) -> int:
    """Most large parts of a row of G groups."""
    return 2 * G + 8


@emitted(result=types.float32)
def _largest(b: ir.IRBuilder, num_vectors: ir.Value, x: ir.Value) -> ir.Value:
    """The largest |x| of a group; the bits of |x|, as integers, sort like the numbers, and NaN sorts above all."""
    with Loop(b, num_vectors, [constant(I32x16, 0)]) as loop:
        at = offset(b, x, (loop.index, 4 * LANES))
        bits = b.and_(load(b, I32x16, at), constant(I32x16, 0x7FFFFFFF))
        loop.carried = [call(b, "llvm.umax.v16i32", I32x16, [loop.carried[0], bits])]
    return b.bitcast(call(b, "llvm.vector.reduce.umax.v16i32", I32, loop.results), F32)


def _rounded(b: ir.IRBuilder, x: ir.Value, inverse: ir.Value) -> ir.Value:
    """Integers nearest to x * inverse; unspecified for numbers that are not finite."""
    # Adding 1.5 * 2 ** 23 rounds, and leaves the integer in the low bits.
    shifted = b.fadd(b.fmul(x, inverse), constant(F32x16, ROUNDER))
    return b.sub(b.bitcast(shifted, I32x16), b.bitcast(constant(F32x16, ROUNDER), I32x16))


@emitted(result=types.int32, inverse=types.float32)
def _round_group(b: ir.IRBuilder, num_vectors: ir.Value, x: ir.Value, inverse: ir.Value, out: ir.Value) -> ir.Value:
    """Round floats at ``x`` times ``inverse`` to int8 at ``out``; returns their sum."""
    factor = splat(b, inverse)
    with Loop(b, num_vectors, [constant(I32x16, 0)]) as loop:
        whole = _rounded(b, load(b, F32x16, offset(b, x, (loop.index, 4 * LANES))), factor)
        store(b, b.trunc(whole, ir.VectorType(I8, LANES)), offset(b, out, (loop.index, LANES)))
        loop.carried = [b.add(loop.carried[0], whole)]
    return call(b, "llvm.vector.reduce.add.v16i32", I32, loop.results)


@emitted(limit=types.float32, step=types.float32, inverse=types.float32)
def _take_large(
    b: ir.IRBuilder, num_vectors: ir.Value, x: ir.Value, limit: ir.Value, step: ir.Value, inverse: ir.Value,
    rest: ir.Value, taken: ir.Value,
) -> None:  # fmt: skip
    """Quantise a group's floats above ``limit`` to int8 at ``taken``; store the remainders in ``rest``."""
    limit, step, inverse = splat(b, limit), splat(b, b.fneg(step)), splat(b, inverse)
    with Loop(b, num_vectors, []) as loop:
        vector = load(b, F32x16, offset(b, x, (loop.index, 4 * LANES)))
        is_large = b.fcmp_ordered(">", call(b, "llvm.fabs.v16f32", F32x16, [vector]), limit)
        whole = b.select(is_large, _rounded(b, vector, inverse), constant(I32x16, 0))
        store(b, b.trunc(whole, ir.VectorType(I8, LANES)), offset(b, taken, (loop.index, LANES)))
        left = fma(b, b.sitofp(whole, F32x16), step, vector)
        store(b, left, offset(b, rest, (loop.index, 4 * LANES)))


@inlined
def _scale(largest: Any) -> Any:
    """The scale of a group and its inverse."""
    if largest < np.float32(TINY):
        return np.float32(0), np.float32(0)
    step = largest / np.float32(LARGEST)
    return float_bits(np.int32(int_bits(step) & ~3)), np.float32(LARGEST) / largest


@inlined
def _sum_bytes(at: int, count: int) -> Any:
    total = 0
    for number in view(at, count, np.int8):
        total += number
    return total


@inlined
def _list_parts(group: int, taken: int, step: Any, zero_point: int, g: int, parts: int) -> Any:
    """Store the large parts of group ``g`` at ``parts``; returns their number."""
    fours = view(taken, group // 4, np.int32)
    words, floats = view(parts, group * PART_WORDS, np.int32), view(parts, group * PART_WORDS, np.float32)
    at = 0
    for i in range(group // 4):
        if fours[i] != 0:
            here = _sum_bytes(taken + 4 * i, 4)
            words[at], floats[at + 1], floats[at + 2] = fours[i], step, np.float32(-ROUNDER) * step
            words[at + 3], words[at + 4], words[at + 5] = ROUNDER_BITS - zero_point * here, g, i
            at += PART_WORDS
    return at // PART_WORDS


@compiled
def quantize_row(
    group: int, joined: int, has_minima: int, x: int, terms: int, parts: int, zero_point: int, G: int, scales_at: int,
    rest: int,
) -> int:  # fmt: skip
    """Quantise the ``G`` groups of a row at ``x`` into terms, which are interleaved with those of other rows.

    Each is of ``joined`` groups of the weight, whose numbers are less ``zero_point``, or ``zero_of_bytes`` once joined.
    Large parts are stored from ``parts`` on, group by group; returns their number. Scratch: float32 [2, G] at
    ``scales_at``, and ``group`` float32 and as many bytes at ``rest``.
    """
    length, zero, num_bytes = group // joined, zero_of_bytes(zero_point, joined), term_bytes(group, joined)
    vectors, first, num_words = length // LANES, (OFFSETS if joined > 1 else OFFSET) // 4, (num_bytes - group) // 4
    total, num_parts, num_vectors, taken = np.float32(0), 0, group // LANES, rest + 4 * group
    steps, inverses = view(scales_at, G, np.float32), view(scales_at + 4 * G, G, np.float32)
    for g in range(G):
        steps[g], inverses[g] = _scale(_largest(num_vectors, x + 4 * group * g))
        total += steps[g]
    limit = np.float32(LARGE_ABOVE) * (total / np.float32(G))
    for g in range(G):
        at, term, step, inverse = x + 4 * group * g, terms + num_bytes * TOKENS_TOGETHER * g, steps[g], inverses[g]
        large = np.float32(0)
        if step > limit and num_parts + group // 4 <= room_for_parts(G):
            _take_large(num_vectors, at, np.float32(LARGEST) * limit, step, inverse, rest, taken)
            num_parts += _list_parts(group, taken, step, zero, g, parts + 4 * PART_WORDS * num_parts)
            large, at = step, rest
            step, inverse = _scale(_largest(num_vectors, rest))
        if not np.isfinite(np.float32(ROUNDER) * step):
            step = np.float32(np.nan)
        side, words, whole = view(term + group, num_words, np.float32), view(term + group, num_words, np.int32), 0
        side[0], side[START // 4] = step, np.float32(-ROUNDER) * step
        for i in range(joined):
            count = _round_group(vectors, at + 4 * length * i, inverse, term + length * i)
            whole += count
            if has_minima:
                more = np.float32(_sum_bytes(taken + length * i, length)) * large if large else np.float32(0)
                side[first + i] = np.float32(count) * step + more
            else:
                words[first + i] = -zero_point * count
        if not has_minima:
            words[OFFSET // 4] = ROUNDER_BITS - zero * whole
    return num_parts
