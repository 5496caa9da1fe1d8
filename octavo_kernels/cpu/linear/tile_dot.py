"""Products of matrices in float32 with Intel's tiles (AMX), which multiply integers of 8 bits.

A row is rounded to integers of 24 bits times a scale, and these are three *slices*, signed integers of 8 bits (Ozaki,
Ogita, Oishi and Rump, 2012; with integers arXiv 2306.11975). A product of two numbers is the sum of the products of
their slices. Eight of these nine are computed, and sums of those of one *level*, the place of both slices together, are
exact. What is left out, and what is lost by rounding, is about 2 ** -24 of the largest numbers of both rows. A row of
activations keeps apart the few that are far larger than its mean: else they would make the others less exact. They are
multiplied in float32.

A *tile* is 1,024 bytes: of activations sixteen tokens with 64 inputs each, of a weight sixteen rows of the same four
inputs of sixteen outputs. The tiles of three slices are adjacent, for each step of 64 inputs.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

from llvmlite import ir
from numba import types

from octavo.ops.linear.sliced_linear import QUAD, SLICES, STEP, UNIT
from octavo_kernels.cpu.compiled import Constant, emitted
from octavo_kernels.cpu.host import missing
from octavo_kernels.cpu.vector_ir import (
    F32,
    I8,
    I16,
    I32,
    I64,
    LANES,
    F32x16,
    I8x16,
    I32x16,
    Loop,
    call,
    constant,
    fma,
    i64,
    load,
    offset,
    splat,
    store,
    sum_one,
)

FEATURES = ("amx-tile", "amx-int8", "avx512f")
ARCH_PRCTL, REQUEST_STATE, TILE_DATA = 158, 0x1023, 18
"""Linux's call with which a process asks for the tiles' registers (its Documentation/arch/x86/xstate.rst)."""

TILE_BYTES = 1024
VECTOR_BYTES = 4 * LANES
SLICE_BITS = 8
LEVELS = (((0, 0),), ((0, 1), (1, 0)), ((0, 2), (1, 1), (2, 0)), ((1, 2), (2, 1)))
"""The slices of activations and of weights that are multiplied, by level."""
STEP_BYTES = SLICES * TILE_BYTES
CHUNK = 4
"""Steps whose tiles stay in the first-level cache for all levels."""
PANELS = TOKEN_TILES = 2
"""Tiles of outputs and of tokens that are multiplied at once: four of sums, and two operands of either kind."""
LEVEL_BYTES = PANELS * TOKEN_TILES * TILE_BYTES
WEIGHT_TILE, X_TILE = 4, 6
"""The first tile of either kind, behind those of sums."""
LARGE_ABOVE = 32
"""Numbers above so many times a row's mean are kept apart: fewer than one in so many."""
SIDE_WORDS, LARGE_WORDS = 2, 2
"""Of a row's scale and the count of its large numbers; and of the index and the value of each, which follow."""


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
def magnitudes(b: ir.IRBuilder, x: ir.Value, num_vectors: ir.Value, out: ir.Value) -> None:
    """Write the largest |x| of a row, NaN if there is one, and their sum."""
    with Loop(b, num_vectors, [constant(I32x16, 0), constant(F32x16, 0.0)]) as loop:
        largest, total = loop.carried
        bits = b.and_(load(b, I32x16, offset(b, x, (loop.index, VECTOR_BYTES))), constant(I32x16, 0x7FFFFFFF))
        total = b.fadd(total, b.bitcast(bits, F32x16))
        # The bits of |x|, as integers, sort like the numbers, and NaN sorts above all.
        loop.carried = [call(b, "llvm.umax.v16i32", I32x16, [largest, bits]), total]
    largest, total = loop.results
    store(b, call(b, "llvm.vector.reduce.umax.v16i32", I32, [largest]), out)
    store(b, sum_one(b, total), out, 4)


@emitted(factor=types.float32)
def slice_row(
    b: ir.IRBuilder, row: ir.Value, num_vectors: ir.Value, factor: ir.Value, num_steps: ir.Value, out: ir.Value
) -> None:
    """Write the slices of the integers nearest to a row's numbers times ``factor``, a row of each tile, from ``out``
    on; zeros behind ``num_vectors`` vectors of 16."""
    scale, half = splat(b, factor), constant(I32x16, 1 << (SLICE_BITS - 1))

    def places(vector: ir.Value) -> list[tuple[int, ir.Value]]:
        quarter = b.and_(vector, i64(3))
        at = offset(b, out, (b.lshr(vector, i64(2)), STEP_BYTES), (quarter, LANES))
        return [(i, b.add(at, i64(TILE_BYTES * i))) for i in reversed(range(SLICES))]

    with Loop(b, num_vectors, []) as loop:
        x = b.fmul(load(b, F32x16, offset(b, row, (loop.index, VECTOR_BYTES))), scale)
        rounding = constant(I32x16, 0), ir.Constant(I16, -1), ir.Constant(I32, 4)  # as usual
        whole = call(b, "llvm.x86.avx512.mask.cvtps2dq.512", I32x16, [x, *rounding])
        for i, place in places(loop.index):
            store(b, b.trunc(whole, I8x16), place)
            if i:
                whole = b.ashr(b.add(whole, half), constant(I32x16, SLICE_BITS))
    with Loop(b, b.sub(b.shl(num_steps, i64(2)), num_vectors), []) as loop:
        for _, place in places(b.add(num_vectors, loop.index)):
            store(b, constant(I8x16, 0), place)


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
    b: ir.IRBuilder, weight: ir.Value, weight_stride: ir.Value, x: ir.Value, x_stride: ir.Value, num_steps: ir.Value,
    num_token_tiles: ir.Value, sums: ir.Value,
) -> None:  # fmt: skip
    """Two panels of a weight times ``num_token_tiles`` (1 or 2) tiles of tokens.

    Strides are from one panel, or one tile of tokens, to the next. ``sums`` gets tiles [levels, PANELS, TOKEN_TILES] of
    int32, tokens by outputs.
    """
    for count in range(1, TOKEN_TILES + 1):
        with b.if_then(b.icmp_signed("==", num_token_tiles, i64(count))):
            w_at = [offset(b, weight, (weight_stride, i)) for i in range(PANELS)]
            x_at = [offset(b, x, (x_stride, i)) for i in range(count)]
            _emit_chunk(b, w_at, x_at, _least(b, num_steps, i64(CHUNK)), sums, is_first=True)
            with Loop(b, b.udiv(b.sub(num_steps, i64(1)), i64(CHUNK)), []) as loop:
                first = b.mul(b.add(loop.index, i64(1)), i64(CHUNK))
                w_on, x_on = ([offset(b, at, (first, STEP_BYTES)) for at in side] for side in (w_at, x_at))
                _emit_chunk(b, w_on, x_on, _least(b, b.sub(num_steps, first), i64(CHUNK)), sums, is_first=False)


@emitted()
def join_levels(
    b: ir.IRBuilder, sums: ir.Value, sides: ir.Value, side_bytes: ir.Value, scales: ir.Value, weight: ir.Value,
    num_rows: ir.Value,
) -> None:  # fmt: skip
    """Make the sums of a panel, ``num_rows`` rows of int32 for each level, numbers of float32 in the first level's
    place, with the products of large numbers. ``sides`` are those of the rows, ``scales`` the panel's."""
    scale = load(b, F32x16, scales)
    lower = constant(F32x16, 2.0**-SLICE_BITS)
    with Loop(b, num_rows, []) as loop:
        at, side = offset(b, sums, (loop.index, VECTOR_BYTES)), b.add(sides, b.mul(loop.index, side_bytes))
        levels = [load(b, I32x16, at, LEVEL_BYTES * i) for i in reversed(range(len(LEVELS)))]
        total = b.sitofp(levels[0], F32x16)
        for level in levels[1:]:
            total = fma(b, total, lower, b.sitofp(level, F32x16))
        store(b, b.fmul(total, b.fmul(splat(b, load(b, F32, side)), scale)), at)
        count = load(b, I32, side, 4)
        with b.if_then(b.icmp_signed("!=", count, ir.Constant(I32, 0))):
            with Loop(b, b.sext(count, I64), [load(b, F32x16, at)]) as large:
                entry = offset(b, side, (large.index, 4 * LARGE_WORDS))
                weights = b.fmul(_emit_weights(b, weight, b.sext(load(b, I32, entry, 4 * SIDE_WORDS), I64)), scale)
                x = splat(b, load(b, F32, entry, 4 * SIDE_WORDS + 4))
                large.carried = [fma(b, x, weights, large.carried[0])]
            store(b, large.results[0], at)


def _emit_weights(b: ir.IRBuilder, weight: ir.Value, k: ir.Value) -> ir.Value:
    """A panel's weights of an input, without their scales."""
    within, quad = b.and_(k, i64(STEP - 1)), i64(QUAD - 1)
    at = offset(b, weight, (b.udiv(k, i64(STEP)), STEP_BYTES), (b.udiv(within, i64(QUAD)), VECTOR_BYTES))
    left = splat(b, b.trunc(b.mul(b.sub(quad, b.and_(k, quad)), i64(8)), I32))
    whole = constant(I32x16, 0)
    for i in range(SLICES):
        part = b.ashr(b.shl(load(b, I32x16, at, TILE_BYTES * i), left), constant(I32x16, 24))
        whole = b.add(b.shl(whole, constant(I32x16, SLICE_BITS)), part)
    return b.fmul(b.sitofp(whole, F32x16), constant(F32x16, 1 / UNIT))


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
    b: ir.IRBuilder, w_at: list[ir.Value], x_at: list[ir.Value], num_steps: ir.Value, sums: ir.Value, *, is_first: bool
) -> None:
    """Add the products of up to CHUNK steps, from the addresses of tiles on, to the sums, or begin them."""
    places = {(i, j): TOKEN_TILES * i + j for i in range(PANELS) for j in range(len(x_at))}
    w_tiles, x_tiles = range(WEIGHT_TILE, WEIGHT_TILE + PANELS), range(X_TILE, X_TILE + TOKEN_TILES)
    for level, products in enumerate(LEVELS):
        outs = {place: b.add(sums, i64(LEVEL_BYTES * level + TILE_BYTES * place)) for place in places.values()}
        for place, out in outs.items():
            if is_first:
                tile_call(b, "tilezero", place)
            else:
                tile_load(b, place, out, VECTOR_BYTES)
        with Loop(b, num_steps, []) as loop:
            for x, w in products:
                for tiles, addresses, term in ((w_tiles, w_at, w), (x_tiles, x_at, x)):
                    for tile, at in zip(tiles, addresses, strict=False):
                        here = offset(b, at, (loop.index, STEP_BYTES))
                        tile_load(b, tile, b.add(here, i64(TILE_BYTES * term)), VECTOR_BYTES)
                for (i, j), place in places.items():
                    tile_call(b, "tdpbssd", place, x_tiles[j], w_tiles[i])
        for place, out in outs.items():
            tile_store(b, place, out, VECTOR_BYTES)
