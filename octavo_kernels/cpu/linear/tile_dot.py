"""Products of matrices in float32 with Intel's tiles (AMX), which multiply numbers of bfloat16.

A float32 is the sum of three terms of bfloat16, which have eight bits each, and a product of two the sum of the
products of their terms. The six largest of these nine are computed; what is left out is below a float32's last bit.
Products that are not of two first terms are added first: they are small, and their sum is rounded little.

A *tile* is 1,024 bytes: sixteen rows of sixteen words. A weight's has sixteen outputs and 32 inputs; one of activations
has sixteen pairs of inputs and sixteen tokens. A term's tiles lie behind those of the term before, for each step of 32
inputs.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

from llvmlite import ir

from octavo_kernels.cpu.attention.attention_turned import turned
from octavo_kernels.cpu.compiled import Constant, emitted
from octavo_kernels.cpu.host import missing
from octavo_kernels.cpu.vector_ir import (
    FORMAT_BYTES,
    I8,
    I16,
    I32,
    LANES,
    F32x16,
    I32x16,
    Loop,
    call,
    constant,
    i64,
    load,
    load_floats,
    offset,
    shuffle,
    store,
)

FEATURES = ("amx-tile", "amx-bf16", "avx512f", "avx512bf16")
ARCH_PRCTL, REQUEST_STATE, TILE_DATA = 158, 0x1023, 18
"""Linux's call with which a process asks for the tiles' registers (its Documentation/arch/x86/xstate.rst)."""

TILE_BYTES = 1024
VECTOR_BYTES = 4 * LANES
STEP = 2 * LANES
"""Inputs of a tile."""
X_TERMS = 3
WEIGHT_TERMS = (3, 1, 2)
"""By number format: float32, bfloat16, float16."""
PRODUCTS = ((0, 2), (0, 1), (1, 1), (1, 0), (2, 0))
"""Terms of weights and of activations, without the first of both; neighbours share one."""
CHUNK = 16
"""Steps whose sums are added in tiles: longer sums are sums of these, which are rounded less often."""
PANELS = TOKEN_TILES = 2
"""Tiles of outputs and of tokens that are multiplied at once: four of sums, and two operands of either kind."""
WEIGHT_TILE, X_TILE = 4, 6
"""The first tile of either kind, behind those of sums."""


_Type: Any = ir.Type  # llvmlite has no types


class _BFloat(_Type):  # type: ignore[misc]
    """A type that llvmlite lacks."""

    def _to_string(self) -> str:
        return "bfloat"


BFLOAT = _BFloat()


@functools.cache
def declines() -> str | None:
    """Why tiles cannot be used here; ``None`` if they can."""
    if (reason := missing(FEATURES)) is not None:
        return reason
    failed = ctypes.CDLL(None).syscall(ARCH_PRCTL, REQUEST_STATE, TILE_DATA)
    return "the operating system does not lend the tiles' registers (AMX)" if failed else None


@emitted()
def take_tiles(b: ir.IRBuilder, num_rows: Constant, row_bytes: Constant) -> None:
    """Set the tiles' sizes: sums have ``num_rows`` rows, and tiles from X_TILE on as many of ``row_bytes``. Both are
    constants. ``give_tiles`` must follow on the same thread."""
    widths, heights = (
        [64, 0] * X_TILE + [row_bytes, 0] * 2,
        [num_rows] * WEIGHT_TILE + [row_bytes // 4] * 2 + [num_rows] * 2,
    )
    sizes = bytes([1, *[0] * 15, *widths, *[0] * 16, *heights, *[0] * 8])
    kind = ir.ArrayType(I8, len(sizes))
    place = b.alloca(kind)
    b.store(ir.Constant(kind, bytearray(sizes)), place)
    call(b, "llvm.x86.ldtilecfg", ir.VoidType(), [b.bitcast(place, I8.as_pointer())])


@emitted()
def give_tiles(b: ir.IRBuilder) -> None:
    """Empty the tiles, which the system need not save any more."""
    call(b, "llvm.x86.tilerelease", ir.VoidType(), [])


@emitted()
def split_row(b: ir.IRBuilder, number_format: Constant, row: ir.Value, num_vectors: ir.Value, out: ir.Value) -> None:
    """Write the terms of a row of ``num_vectors`` vectors of 16 numbers of a format, the first at ``out``.

    Each term of each step is a row of a tile.
    """
    num_terms = WEIGHT_TERMS[number_format]
    with Loop(b, b.lshr(num_vectors, i64(1)), []) as loop:
        at = offset(b, row, (loop.index, STEP * FORMAT_BYTES[number_format]))
        halves = [load_floats(b, number_format, at, LANES * FORMAT_BYTES[number_format] * i) for i in range(2)]
        _store_terms(b, halves, num_terms, offset(b, out, (loop.index, TILE_BYTES * num_terms)))
    with b.if_then(b.trunc(num_vectors, ir.IntType(1))):
        last = b.sub(num_vectors, i64(1))
        halves = [
            load_floats(b, number_format, offset(b, row, (last, LANES * FORMAT_BYTES[number_format]))),
            constant(F32x16, 0.0),
        ]
        _store_terms(b, halves, num_terms, offset(b, out, (b.lshr(last, i64(1)), TILE_BYTES * num_terms)))


def _store_terms(b: ir.IRBuilder, halves: list[ir.Value], num_terms: int, out: ir.Value) -> None:
    for term in range(num_terms):
        rounded = call(b, "llvm.x86.avx512bf16.cvtne2ps2bf16.512", ir.VectorType(BFLOAT, STEP), halves[::-1])
        rounded = b.bitcast(rounded, ir.VectorType(I16, STEP))
        store(b, rounded, out, TILE_BYTES * term)
        for i in range(2):
            words = shuffle(b, rounded, rounded, range(LANES * i, LANES * (i + 1)))
            upper = b.shl(b.zext(words, I32x16), constant(I32x16, 16))
            halves[i] = b.fsub(halves[i], b.bitcast(upper, F32x16))


@emitted()
def turn_tiles(b: ir.IRBuilder, tiles: ir.Value, num_tiles: ir.Value) -> None:
    """Transpose tiles, each in its place."""
    with Loop(b, num_tiles, []) as loop:
        at = offset(b, tiles, (loop.index, TILE_BYTES))
        for i, vector in enumerate(turned(b, [load(b, F32x16, at, VECTOR_BYTES * i) for i in range(LANES)])):
            store(b, vector, at, VECTOR_BYTES * i)


@emitted()
def ask_to_write(b: ir.IRBuilder, address: ir.Value, stride: ir.Value, num_rows: ir.Value) -> None:
    """Prefetch two panels of rows, which the sums are written to: they come while the tiles are multiplied."""
    hints = [ir.Constant(I32, hint) for hint in (1, 3, 1)]  # to write, to the first level, data
    with Loop(b, num_rows, []) as loop:
        row = b.add(address, b.mul(loop.index, stride))
        for i in range(PANELS):
            place = b.inttoptr(b.add(row, i64(VECTOR_BYTES * i)), I8.as_pointer())
            call(b, "llvm.prefetch.p0", ir.VoidType(), [place, *hints])


@emitted()
def multiply_tiles(
    b: ir.IRBuilder, number_format: Constant, weight: ir.Value, weight_stride: ir.Value, x: ir.Value,
    x_stride: ir.Value, num_steps: ir.Value, num_token_tiles: ir.Value, sums: ir.Value, room: ir.Value,
) -> None:  # fmt: skip
    """Two panels of a weight of a format times ``num_token_tiles`` (1 or 2) tiles of tokens.

    Strides are from one panel, or one tile of tokens, to the next. ``sums`` gets tiles [PANELS, TOKEN_TILES] of
    float32, outputs by tokens; ``room`` is as large.
    """
    num_terms = WEIGHT_TERMS[number_format]
    for count in range(1, TOKEN_TILES + 1):
        with b.if_then(b.icmp_signed("==", num_token_tiles, i64(count))):
            w_at = [offset(b, weight, (weight_stride, i)) for i in range(PANELS)]
            x_at = [offset(b, x, (x_stride, i)) for i in range(count)]
            _emit_chunk(b, num_terms, w_at, x_at, _least(b, num_steps, i64(CHUNK)), sums)
            with Loop(b, b.udiv(b.sub(num_steps, i64(1)), i64(CHUNK)), []) as loop:
                first = b.mul(b.add(loop.index, i64(1)), i64(CHUNK))
                w_on = [offset(b, at, (first, TILE_BYTES * num_terms)) for at in w_at]
                x_on = [offset(b, at, (first, TILE_BYTES * X_TERMS)) for at in x_at]
                _emit_chunk(b, num_terms, w_on, x_on, _least(b, b.sub(num_steps, first), i64(CHUNK)), room)
                with Loop(b, i64(PANELS * TOKEN_TILES * LANES), []) as row:
                    at, more = (offset(b, base, (row.index, VECTOR_BYTES)) for base in (sums, room))
                    store(b, b.fadd(load(b, F32x16, at), load(b, F32x16, more)), at)


def _least(b: ir.IRBuilder, x: ir.Value, y: ir.Value) -> ir.Value:
    return b.select(b.icmp_signed("<", x, y), x, y)


def tile_call(b: ir.IRBuilder, name: str, *args: Any) -> None:
    tiles = [ir.Constant(I8, arg) if isinstance(arg, int) else arg for arg in args]
    call(b, f"llvm.x86.{name}", ir.VoidType(), tiles)


def tile_load(b: ir.IRBuilder, tile: int, address: ir.Value, row_bytes: int) -> None:
    """Load a tile whose rows are ``row_bytes`` apart."""
    tile_call(b, "tileloadd64", tile, b.inttoptr(address, I8.as_pointer()), i64(row_bytes))


def tile_store(b: ir.IRBuilder, tile: int, address: ir.Value, row_bytes: int) -> None:
    """Store a tile in rows that are ``row_bytes`` apart."""
    tile_call(b, "tilestored64", tile, b.inttoptr(address, I8.as_pointer()), i64(row_bytes))


def _emit_chunk(
    b: ir.IRBuilder, num_terms: int, w_at: list[ir.Value], x_at: list[ir.Value], num_steps: ir.Value, out: ir.Value
) -> None:
    """Products of up to CHUNK steps, from the addresses of tiles on, to ``out``."""
    places = {(i, j): TOKEN_TILES * i + j for i in range(PANELS) for j in range(len(x_at))}
    w_tiles, x_tiles = range(WEIGHT_TILE, WEIGHT_TILE + PANELS), range(X_TILE, X_TILE + TOKEN_TILES)
    for place in places.values():
        tile_call(b, "tilezero", place)
    small = [(w, x) for w, x in PRODUCTS if w < num_terms]
    for products in (small, [(0, 0)]):
        with Loop(b, num_steps, []) as loop:
            w_on = [offset(b, at, (loop.index, TILE_BYTES * num_terms)) for at in w_at]
            x_on = [offset(b, at, (loop.index, TILE_BYTES * X_TERMS)) for at in x_at]
            loaded = (-1, -1)
            for w, x in products:
                sides = ((w, loaded[0], w_tiles, w_on), (x, loaded[1], x_tiles, x_on))
                for term, before, tiles, on in sides:
                    for tile, at in zip(tiles, on, strict=False):
                        if term != before:
                            tile_load(b, tile, b.add(at, i64(TILE_BYTES * term)), VECTOR_BYTES)
                for (i, j), place in places.items():
                    tile_call(b, "tdpbf16ps", place, w_tiles[i], x_tiles[j])
                loaded = (w, x)
    for place in places.values():
        tile_store(b, place, b.add(out, i64(TILE_BYTES * place)), VECTOR_BYTES)
