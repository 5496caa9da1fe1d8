"""Rows of a KV cache: where they lie, how their numbers are loaded, and how those of 8 and 4 bits are made.

A row holds the numbers of one head at one position, in a number format; rows of INT8 and INT4 are those of
``octavo.ops.attention.cached_rows``, to the bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from llvmlite import ir

from octavo.ops.attention import cached_rows
from octavo.ops.attention.cached_rows import GROUP
from octavo_kernels.cpu.compiled import Constant, emitted, inlined
from octavo_kernels.cpu.half import emit_row, emit_widened, narrow
from octavo_kernels.cpu.memory import float_bits, int_bits, view
from octavo_kernels.cpu.tensors import FORMATS as FLOATS
from octavo_kernels.cpu.vector_ir import (
    E4M3,
    F32,
    FLOAT32,
    FORMAT_BYTES,
    I32,
    LANES,
    F32x16,
    I8x16,
    I32x16,
    Loop,
    constant,
    fma,
    i64,
    load,
    load_floats,
    offset,
    splat,
    store,
)

INT8, INT4 = len(FORMAT_BYTES), len(FORMAT_BYTES) + 1
"""Number formats besides those of ``vector_ir``."""
FORMATS = {**FLOATS, torch.float8_e4m3fn: E4M3, torch.int8: INT8, cached_rows.INT4: INT4, torch.uint8: INT4}
"""By the type of a cache, or of its tensors."""
STEP_BYTES = (*(LANES * item for item in FORMAT_BYTES), LANES, LANES // 2)
"""Of the sixteen numbers of a vector."""
HEADER_BYTES = 4
"""Of a scale, or of a least number and a scale."""
STEPS_A_GROUP = GROUP // LANES


@inlined
def row_bytes(number_format: Any, H: Any) -> Any:
    """Bytes of a row of H numbers."""
    num_steps = (H + LANES - 1) // LANES
    if number_format == INT8:
        return HEADER_BYTES + num_steps * STEP_BYTES[INT8]
    if number_format == INT4:
        return (num_steps + STEPS_A_GROUP - 1) // STEPS_A_GROUP * HEADER_BYTES + num_steps * STEP_BYTES[INT4]
    return FORMAT_BYTES[number_format] * H


def emit_header_bytes(b: ir.IRBuilder, number_format: int, num_steps: ir.Value) -> ir.Value:
    """Bytes of a row before its codes."""
    if number_format == INT8:
        return i64(HEADER_BYTES)
    groups = b.sdiv(b.add(num_steps, i64(STEPS_A_GROUP - 1)), i64(STEPS_A_GROUP))
    return b.mul(groups, i64(HEADER_BYTES if number_format == INT4 else 0))


def emit_row_bytes(b: ir.IRBuilder, number_format: int, num_steps: ir.Value) -> ir.Value:
    """Bytes of a row of so many vectors."""
    return offset(b, emit_header_bytes(b, number_format, num_steps), (num_steps, STEP_BYTES[number_format]))


def load_step(b: ir.IRBuilder, number_format: int, row: ir.Value, num_steps: ir.Value, step: ir.Value) -> ir.Value:
    """A vector of a row of ``num_steps``, as float32; those of E4M3 are divided by ``E4M3_FACTOR``."""
    if number_format not in (INT8, INT4):
        return load_floats(b, number_format, offset(b, row, (step, STEP_BYTES[number_format])))
    codes_at = b.add(row, emit_header_bytes(b, number_format, num_steps))
    codes_at = offset(b, codes_at, (step, STEP_BYTES[number_format]))
    if number_format == INT8:
        codes = b.sitofp(b.sext(load(b, I8x16, codes_at), I32x16), F32x16)
        return b.fmul(codes, splat(b, load(b, F32, row)))
    words = load(b, ir.VectorType(I32, 2), codes_at)
    lanes = ir.Constant(I32x16, [lane * 2 // LANES for lane in range(LANES)])
    words = b.shuffle_vector(words, ir.Constant(words.type, ir.Undefined), lanes)
    words = b.lshr(words, ir.Constant(I32x16, [4 * (lane % 8) for lane in range(LANES)]))
    codes = b.sitofp(b.and_(words, constant(I32x16, 15)), F32x16)
    header = splat(b, load(b, I32, offset(b, row, (b.sdiv(step, i64(STEPS_A_GROUP)), HEADER_BYTES))))
    scale = b.bitcast(b.and_(header, constant(I32x16, -0x10000)), F32x16)
    least = b.bitcast(b.shl(header, constant(I32x16, 16)), F32x16)
    return fma(b, codes, scale, least)


@emitted()
def unpack(
    b: ir.IRBuilder, number_format: Constant, rows: ir.Value, H: ir.Value, count: ir.Value, out: ir.Value,
    num_steps: ir.Value,
) -> None:  # fmt: skip
    """``count`` neighbouring rows of H numbers of a format, a constant, as float32 rows of ``num_steps`` vectors.

    Numbers behind the last one are those of the row, or are not written.
    """
    is_packed = number_format in (INT8, INT4)
    row_bytes = emit_row_bytes(b, number_format, num_steps) if is_packed else b.mul(H, i64(FORMAT_BYTES[number_format]))
    with Loop(b, count, []) as outer:
        row = b.add(rows, b.mul(row_bytes, outer.index))
        to = b.add(out, b.mul(b.mul(num_steps, outer.index), i64(4 * LANES)))
        if is_packed:
            with Loop(b, num_steps, []) as loop:
                store(
                    b, load_step(b, number_format, row, num_steps, loop.index), offset(b, to, (loop.index, 4 * LANES))
                )
        else:
            emit_row(b, (number_format, row), (FLOAT32, to), H, emit_widened)


def row_writer(number_format: int) -> Callable[[int, Any, int, int], None]:
    """What writes a row, given its format, whole vectors of float32, H and its address; for use in compiled code.

    It may change the vectors up to H, and those behind are 0.
    """
    return {INT8: _pack_8_bits, INT4: _pack_4_bits}.get(number_format, _narrow)


@inlined
def _narrow(number_format: Constant, x: Any, H: int, out: int) -> None:
    narrow(number_format, x.ctypes.data, out, H)


@inlined
def _pack_8_bits(number_format: int, x: Any, H: int, out: int) -> None:
    largest = np.float32(0)
    for number in x:
        size = abs(number)
        if size > largest or size != size:
            largest = size
    scale, codes = largest / np.float32(127), view(out + HEADER_BYTES, len(x), np.int8)
    view(out, 1, np.float32)[0] = scale
    for i in range(len(x)):
        codes[i] = np.int8(_code(x[i], scale, -127, 127))


@inlined
def _pack_4_bits(number_format: int, x: Any, H: int, out: int) -> None:
    rotate(INT4, x)
    num_groups = (len(x) + GROUP - 1) // GROUP
    headers, pairs = view(out, num_groups, np.int32), view(out + 4 * num_groups, len(x) // 2, np.uint8)
    for group in range(num_groups):
        first, last = group * GROUP, min(len(x), (group + 1) * GROUP)
        low = high = x[first]
        for i in range(first, last):
            if x[i] < low or x[i] != x[i]:
                low = x[i]
            if x[i] > high or x[i] != x[i]:
                high = x[i]
        least = _cut(low, low < 0)
        span = (high - least) / np.float32(15)
        scale = _cut(span, span > 0)
        headers[group] = int_bits(scale) & np.int32(-0x10000) | int_bits(least) >> np.int32(16) & np.int32(0xFFFF)
        for i in range(first // 2, last // 2):
            even, odd = _code(x[2 * i] - least, scale, 0, 15), _code(x[2 * i + 1] - least, scale, 0, 15)
            pairs[i] = np.uint8(np.int32(even) | np.int32(odd) << 4)
    for i in range(H, len(x)):
        x[i] = 0  # as it was before


@inlined
def rotate(number_format: int, x: Any) -> None:
    """``cached_rows.rotated`` in place, for formats that are stored rotated."""
    if number_format != INT4:
        return
    half = 1
    while half < len(x) & -len(x):
        for first in range(0, len(x), 2 * half):
            for i in range(first, first + half):
                even, odd = x[i], x[i + half]
                x[i], x[i + half] = even + odd, even - odd
        half *= 2


@inlined
def _code(x: Any, scale: Any, lowest: Any, highest: Any) -> Any:
    """As ``ops.attention.cached_rows`` has it; 0 where the scale is none."""
    if not (scale > 0 and scale < np.inf):
        return np.float32(0)
    return np.float32(min(max(np.rint(x / scale), np.float32(lowest)), np.float32(highest)))


@inlined
def _cut(x: Any, grows: Any) -> Any:
    """As ``ops.attention.cached_rows`` has it."""
    if not abs(x) < np.inf:
        return np.float32(np.nan)
    if x == 0:
        return np.float32(0)
    return float_bits(np.int32((int_bits(x) + (np.int32(0xFFFF) if grows else np.int32(0))) & np.int32(-0x10000)))
