"""``sliced_linear`` with Intel's tiles: see ``tile_dot``.

Slices of activations are written to memory that is small enough to stay in caches, and is reused, for groups of rows.
Sums of slices are exact, so that they depend on no order.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from octavo.ops.linear.linear import PLAIN, Fused, check_linear, compose
from octavo.ops.linear.sliced_linear import LARGEST, STEP, TINY, UNIT, SlicedValues, sliced_linear
from octavo_kernels.cpu.calls import call
from octavo_kernels.cpu.compiled import driver, inlined, task
from octavo_kernels.cpu.linear.epilogue import EPILOGUE, GATES, finish
from octavo_kernels.cpu.linear.tile_dot import (
    LARGE_ABOVE,
    LARGE_WORDS,
    LEVELS,
    PANELS,
    SIDE_WORDS,
    STEP_BYTES,
    TILE_BYTES,
    TOKEN_TILES,
    VECTOR_BYTES,
    ask_to_write,
    declines,
    give_tiles,
    join_levels,
    magnitudes,
    multiply_tiles,
    slice_row,
    take_tiles,
)
from octavo_kernels.cpu.memory import fields, keep, read, view, whole_lines
from octavo_kernels.cpu.rows.norms import normalise_row
from octavo_kernels.cpu.tensors import address, declines_floats, whole_vectors
from octavo_kernels.cpu.threads import run
from octavo_kernels.cpu.vector_ir import LANES

BLOCK_BYTES = 1 << 20
"""Of the slices of rows that stay in the second-level cache while all panels are multiplied with them."""
MOST_BYTES = 1 << 22
"""Of the slices of a group of rows. New memory for all of them would cost more than the products."""
TILE_FLOATS = TILE_BYTES // 4
NUMBERS_A_PIECE = 4096
MULTIPLICATIONS_A_PIECE = 400_000
ROOM_FOR_LARGE = 2
"""Times the most numbers of a row that can be so far above its mean: without them, others may be."""

ARGUMENTS = fields(
    EPILOGUE,
    "slice multiply x norm eps:float weight scales K width steps side_bytes",
    "slices sides block first_tile last_tile",
)
"""``width`` is K rounded up to a multiple of 16, ``steps`` the tiles that hold it, and ``side_bytes`` the size of a
row's side: see ``tile_dot``. The driver sets the second line: addresses of slices and sides, the tiles of tokens of a
block, and the group of tiles that are computed."""


@inlined
def _take_large(a: Any, rest: Any, limit: Any, side: int) -> None:
    """Move a row's numbers above ``limit`` to its side, and leave zeros."""
    words, floats = view(side, a.side_bytes // 4, np.int32), view(side, a.side_bytes // 4, np.float32)
    for k in range(a.K):
        if abs(rest[k]) > limit:
            at = SIDE_WORDS + LARGE_WORDS * words[1]
            words[at], floats[at + 1], rest[k] = k, rest[k], 0
            words[1] += 1


@inlined
def _slice(a: Any, x: int, rest: Any, found: Any, side: int, out: int) -> None:
    """Write a row's side, and its slices from ``out`` on."""
    words, floats = view(side, SIDE_WORDS, np.int32), view(side, SIDE_WORDS, np.float32)
    vectors, most, words[1] = a.width // LANES, ROOM_FOR_LARGE * (a.K // LARGE_ABOVE), 0
    magnitudes(x, vectors, found.ctypes.data)
    limit = np.float32(LARGE_ABOVE) * (found[1] / np.float32(a.K))
    while limit < found[0] < np.inf and words[1] <= most:
        if words[1] == 0:
            rest[:] = view(x, a.width, np.float32)
            x = rest.ctypes.data
        _take_large(a, rest, limit, side)
        magnitudes(x, vectors, found.ctypes.data)
        limit = np.float32(LARGE_ABOVE) * (found[1] / np.float32(a.K))  # without those
    largest, factor = found[0], np.float32(0)
    if not np.isfinite(largest):
        floats[0] = np.nan
    elif largest < np.float32(TINY):
        floats[0] = 0
    else:
        floats[0], factor = largest / np.float32(LARGEST), np.float32(LARGEST * UNIT) / largest
    slice_row(x, vectors, factor, a.steps, out)


@task
def _slice_task(arguments: int, begin: int, end: int) -> None:
    """Task over a group's tiles of tokens."""
    a = read(arguments, ARGUMENTS)
    normed, rest, found = np.zeros(a.width, np.float32), np.empty(a.width, np.float32), np.empty(2, np.float32)
    for tile in range(begin, end):
        for row in range(LANES):
            t = (a.first_tile + tile) * LANES + row
            x = a.x + 4 * a.width * t
            if t >= a.T:
                normed[:] = 0
                x = normed.ctypes.data
            elif a.norm:
                normalise_row(x, a.norm, normed.ctypes.data, a.width, a.K, a.eps)
                x = normed.ctypes.data
            side = a.sides + (tile * LANES + row) * a.side_bytes
            _slice(a, x, rest, found, side, a.slices + tile * a.steps * STEP_BYTES + row * VECTOR_BYTES)
    keep((normed, rest, found))


@inlined
def _panel(a: Any, pair: int, half: int) -> Any:
    """The first panel of a pair, or the second: gates and their ups, or neighbours."""
    return pair + half * (a.N // (2 * LANES)) if a.gate else PANELS * pair + half


@inlined
def _num_pairs(a: Any) -> Any:
    return (a.N + PANELS * LANES - 1) // (PANELS * LANES)


@task
def _multiply_task(arguments: int, begin: int, end: int) -> None:
    """Task over pairs of panels, for a block of rows, then for the next one."""
    a = read(arguments, ARGUMENTS)
    tile_bytes, num_pairs, ahead = a.steps * STEP_BYTES, _num_pairs(a), 4 * (a.N // 2 if a.gate else a.N)
    room = whole_lines(len(LEVELS) * PANELS * TOKEN_TILES, TILE_FLOATS)
    sums, ups = room.ctypes.data, room.ctypes.data + TOKEN_TILES * TILE_BYTES
    take_tiles(LANES, VECTOR_BYTES)
    for item in range(begin, end):
        pair, first = item % num_pairs, a.first_tile + item // num_pairs * a.block
        panel, next_panel, last = _panel(a, pair, 0), _panel(a, pair, 1), min(a.last_tile, first + a.block)
        weight, next_weight = a.weight + panel * tile_bytes, a.weight + next_panel * tile_bytes
        for tile in range(first, last, TOKEN_TILES):
            count, row, x = min(TOKEN_TILES, last - tile), tile * LANES, a.slices + (tile - a.first_tile) * tile_bytes
            rows, sides = min(a.T - row, count * LANES), a.sides + (tile - a.first_tile) * LANES * a.side_bytes
            ask_to_write(a.out + row * ahead + VECTOR_BYTES * panel, ahead, rows)
            multiply_tiles(weight, next_weight - weight, x, tile_bytes, a.steps, count, sums)
            join_levels(sums, sides, a.side_bytes, a.scales + VECTOR_BYTES * panel, weight, rows)
            join_levels(ups, sides, a.side_bytes, a.scales + VECTOR_BYTES * next_panel, next_weight, rows)
            finish(a, sums, ups, row, rows, panel * LANES)
            if not a.gate and next_panel * LANES < a.N:
                finish(a, ups, ups, row, rows, next_panel * LANES)
    give_tiles()
    keep(room)


@driver
def _driver(pool: int, arguments: int) -> int:
    a = read(arguments, ARGUMENTS)
    tiles, tile_bytes = (a.T + LANES - 1) // LANES, a.steps * STEP_BYTES
    a.block = max(TOKEN_TILES, BLOCK_BYTES // tile_bytes // TOKEN_TILES * TOKEN_TILES)
    most = max(1, min(tiles, MOST_BYTES // tile_bytes // a.block * a.block))
    slices, sides = whole_lines(most, tile_bytes // 4), whole_lines(most * LANES, a.side_bytes // 4)
    a.slices, a.sides = slices.ctypes.data, sides.ctypes.data
    for first in range(0, tiles, most):
        a.first_tile, a.last_tile = first, min(tiles, first + most)
        group = a.last_tile - first
        run(pool, a.slice, arguments, group, max(1, NUMBERS_A_PIECE // (a.width * LANES)))
        work = min(group, a.block) * LANES * PANELS * LANES * a.width
        items = _num_pairs(a) * ((group + a.block - 1) // a.block)
        run(pool, a.multiply, arguments, items, max(1, MULTIPLICATIONS_A_PIECE // work))
    keep((slices, sides))
    return 0


def _declines(dtype: torch.dtype) -> str | None:
    return declines_floats(dtype) or declines()


@sliced_linear.kernel(device="cpu", name="numba", preference=10, supports=_declines)
def sliced_linear_numba(x_TK: Tensor, weight: SlicedValues, fused: Fused = PLAIN) -> Tensor:
    """See ``ops.sliced_linear``."""
    bias_N, norm_K, eps, residual_TN, activation = fused
    T, (N, K) = len(x_TK), weight.shape
    if activation not in GATES or (activation and N % (PANELS * LANES)):

        def multiply(normed_TK: Tensor) -> Tensor:
            return sliced_linear_numba(normed_TK, weight, Fused(bias_N))

        return compose(x_TK, fused, multiply)
    check_linear("sliced_linear", x_TK, weight.shape, fused)
    x = whole_vectors(x_TK.float())
    norm = None if norm_K is None else whole_vectors(norm_K.float())
    bias = None if bias_N is None else bias_N.float()
    residual = None if residual_TN is None else residual_TN.float()
    out_TN = residual if residual is not None else torch.empty(T, fused.width(N))
    values = (
        *(address(bias), address(residual), out_TN.data_ptr(), GATES[activation], T, N, _slice_task()),
        *(_multiply_task(), x.data_ptr(), address(norm), eps, weight.slices.data_ptr(), weight.scales_N.data_ptr()),
        *(K, x.shape[1], -(-K // STEP), 4 * (SIDE_WORDS + LARGE_WORDS * (1 + ROOM_FOR_LARGE) * (K // LARGE_ABOVE))),
        *([0] * 5),
    )
    call(_driver(), ARGUMENTS, values)
    return out_TN.to(x_TK.dtype)
