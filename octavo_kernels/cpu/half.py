"""Conversion of float32 rows to the number formats of a cache, and back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir

from octavo_kernels.cpu.compiled import Constant, emitted
from octavo_kernels.cpu.vector_ir import (
    BFLOAT16,
    E4M3,
    F16,
    F32,
    FLOAT16,
    FLOAT32,
    FORMAT_BYTES,
    I8,
    I16,
    I32,
    LANES,
    Loop,
    i64,
    load,
    offset,
    store,
)


def _lanes(kind: ir.Type, like: ir.Value) -> ir.Type:
    """``kind`` if ``like`` is a scalar, a vector of it if ``like`` is a vector."""
    return ir.VectorType(kind, like.type.count) if isinstance(like.type, ir.VectorType) else kind


def _number(kind: ir.Type, value: float) -> ir.Constant:
    return ir.Constant(kind, [value] * kind.count if isinstance(kind, ir.VectorType) else value)


def _narrow(b: ir.IRBuilder, number_format: int, x: ir.Value) -> ir.Value:
    """The nearest number of a format, ties to even."""
    if number_format == FLOAT16:
        return b.fptrunc(x, _lanes(F16, x))
    if number_format == E4M3:
        return _narrow_to_e4m3(b, x)
    if number_format != BFLOAT16:
        return x
    wide, narrow = _lanes(I32, x), _lanes(I16, x)
    bits = b.bitcast(x, wide)
    sixteen = _number(wide, 16)
    is_odd = b.and_(b.lshr(bits, sixteen), _number(wide, 1))
    rounded = b.lshr(b.add(b.add(bits, _number(wide, 0x7FFF)), is_odd), sixteen)
    return b.select(b.fcmp_ordered("ord", x, x), b.trunc(rounded, narrow), _number(narrow, 0x7FC0))


def _narrow_to_e4m3(b: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """As bytes. Numbers that E4M3 cannot hold become the largest that it can, and so does NaN.

    It has 4 bits of exponent with a bias of 7 and 3 of mantissa; below 2 ** -6 numbers are multiples of 2 ** -9, which
    is how far the numbers of float32 from 2 ** 14 on are apart.
    """
    kind, wide = _lanes(F32, x), _lanes(I32, x)
    bits = b.bitcast(x, wide)
    size = b.bitcast(b.and_(bits, _number(wide, 0x7FFFFFFF)), kind)
    size = b.select(b.fcmp_ordered("<", size, _number(kind, 448.0)), size, _number(kind, 448.0))
    size_bits, twenty = b.bitcast(size, wide), _number(wide, 20)
    is_odd = b.and_(b.lshr(size_bits, twenty), _number(wide, 1))
    normal = b.lshr(b.add(b.add(size_bits, _number(wide, 0x7FFFF)), is_odd), twenty)
    normal = b.sub(normal, _number(wide, (127 - 7) << 3))
    multiple = b.bitcast(b.fadd(size, _number(kind, 2.0**14)), wide)
    multiple = b.sub(multiple, _number(wide, (127 + 14) << 23))
    is_small = b.fcmp_ordered("<", size, _number(kind, 2.0**-6))
    sign = b.and_(b.lshr(bits, _number(wide, 24)), _number(wide, 0x80))
    return b.trunc(b.or_(b.select(is_small, multiple, normal), sign), _lanes(I8, x))


def emit_widened(b: ir.IRBuilder, number_format: int, x: ir.Value) -> ir.Value:
    """As float32, exactly; numbers of E4M3 as ``vector_ir.load_floats`` has them."""
    if number_format == FLOAT16:
        return b.fpext(x, _lanes(F32, x))
    if number_format == E4M3:
        half = _lanes(I16, x)
        half_bits = b.and_(b.shl(b.sext(x, half), _number(half, 7)), _number(half, 0xBFFF))
        return b.fpext(b.bitcast(half_bits, _lanes(F16, x)), _lanes(F32, x))
    if number_format != BFLOAT16:
        return x
    wide = _lanes(I32, x)
    return b.bitcast(b.shl(b.zext(x, wide), _number(wide, 16)), _lanes(F32, x))


def rounded(b: ir.IRBuilder, number_format: int, x: ir.Value) -> ir.Value:
    """Float32 numbers rounded to a format."""
    return emit_widened(b, number_format, _narrow(b, number_format, x))


_KINDS = {FLOAT32: F32, FLOAT16: F16, BFLOAT16: I16, E4M3: I8}


def emit_row(
    b: ir.IRBuilder,
    source: tuple[int, ir.Value],
    out: tuple[int, ir.Value],
    count: ir.Value,
    change: Callable[..., Any],
) -> None:
    """``change`` applied to ``count`` numbers, sixteen at a time and then one by one."""
    (source_format, source_at), (out_format, out_at) = source, out
    vectors = b.sdiv(count, i64(LANES))
    done = b.mul(vectors, i64(LANES))
    kind = _KINDS[source_format]
    for numbers, first, turns, width in (
        (ir.VectorType(kind, LANES), i64(0), vectors, LANES),
        (kind, done, b.sub(count, done), 1),
    ):
        with Loop(b, turns, []) as loop:
            at = b.add(first, b.mul(loop.index, i64(width)))
            x = load(b, numbers, offset(b, source_at, (at, FORMAT_BYTES[source_format])))
            store(b, change(b, max(source_format, out_format), x), offset(b, out_at, (at, FORMAT_BYTES[out_format])))


@emitted()
def narrow(b: ir.IRBuilder, number_format: Constant, source: ir.Value, out: ir.Value, count: ir.Value) -> None:
    """``count`` float32 numbers at an address, rounded to a format (a constant), to another."""
    emit_row(b, (FLOAT32, source), (number_format, out), count, _narrow)


@emitted()
def widen(b: ir.IRBuilder, number_format: Constant, source: ir.Value, out: ir.Value, count: ir.Value) -> None:
    """``count`` numbers of a format (a constant) at an address, as float32 to another."""
    emit_row(b, (number_format, source), (FLOAT32, out), count, emit_widened)
