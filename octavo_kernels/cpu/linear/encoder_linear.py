"""``encoder_linear`` for dense weights, with Intel's tiles: see ``tile_dot``.

Terms are written to memory that is small enough to stay in caches, and is reused: groups of panels of sixteen outputs,
and for each of them groups of rows. A sum's order depends on neither.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
from torch import Tensor

from octavo.ops.linear import PLAIN, Fused, compose, encoder_linear
from octavo_kernels.cpu.calls import call
from octavo_kernels.cpu.compiled import Constant, compiled_driver, compiled_task, inlined, task
from octavo_kernels.cpu.linear.epilogue import EPILOGUE, GATES, finish
from octavo_kernels.cpu.linear.tile_dot import (
    PANELS,
    STEP,
    TILE_BYTES,
    TOKEN_TILES,
    VECTOR_BYTES,
    WEIGHT_TERMS,
    X_TERMS,
    ask_to_write,
    declines,
    give_tiles,
    multiply_tiles,
    split_row,
    take_tiles,
    turn_tiles,
)
from octavo_kernels.cpu.memory import fields, keep, read, view, whole_lines
from octavo_kernels.cpu.rows.norms import normalise_row
from octavo_kernels.cpu.tensors import address, check_linear, declines_floats, format_beside, whole_vectors
from octavo_kernels.cpu.threads import run
from octavo_kernels.cpu.vector_ir import FLOAT32, FORMAT_BYTES, LANES

BLOCK_BYTES = 1 << 20
"""Of the terms of rows that stay in the second-level cache while all panels are multiplied with them."""
MOST_BYTES = 1 << 22
"""Of the terms of a group of rows, or of panels. New memory for all of them would cost more than the products."""
TILE_FLOATS = TILE_BYTES // 4
NUMBERS_A_PIECE = 4096
MULTIPLICATIONS_A_PIECE = 400_000

ARGUMENTS = fields(
    EPILOGUE,
    "split_x split_weight multiply x norm eps:float weight K width steps",
    "x_terms weight_terms block first_tile last_tile first_pair num_pairs",
)
"""``width`` is K rounded up to a multiple of 16, and ``steps`` the tiles that hold it. The driver sets the second line:
addresses of terms, the tiles of tokens of a block, and the group of tiles and of pairs of panels that are computed."""


@task
def _split_x_task(arguments: int, begin: int, end: int) -> None:
    """Task over a group's tiles of tokens."""
    a = read(arguments, ARGUMENTS)
    normed = np.empty(a.width, np.float32)
    for tile in range(begin, end):
        out = a.x_terms + tile * a.steps * X_TERMS * TILE_BYTES
        for row in range(LANES):
            t = (a.first_tile + tile) * LANES + row
            x = a.x + 4 * a.width * t
            if t >= a.T:
                normed[:] = 0
                x = normed.ctypes.data
            elif a.norm:
                normalise_row(x, a.norm, normed.ctypes.data, a.width, a.K, a.eps)
                x = normed.ctypes.data
            split_row(FLOAT32, x, a.width // LANES, out + 4 * LANES * row)
        turn_tiles(out, a.steps * X_TERMS)
    keep(normed)


@inlined
def _first_output(a: Any, pair: int, half: int) -> Any:
    """Of the first panel of a pair, or of the second: gates and their ups, or neighbours."""
    return pair * LANES + half * (a.N // 2) if a.gate else (PANELS * pair + half) * LANES


@inlined
def _split_pair(number_format: Constant, a: Any, pair: int, out: int) -> None:
    for half in range(PANELS):
        first = _first_output(a, pair, half)
        for row in range(LANES):
            to = out + (half * a.steps * WEIGHT_TERMS[number_format] * LANES + row) * 4 * LANES
            if first + row < a.N:
                source = a.weight + (first + row) * a.width * FORMAT_BYTES[number_format]
                split_row(number_format, source, a.width // LANES, to)
            else:
                for term in range(a.steps * WEIGHT_TERMS[number_format]):
                    view(to + term * TILE_BYTES, LANES, np.float32)[:] = 0


@functools.cache
def _split_weight_task(number_format: int) -> int:
    """Task over a group's pairs of panels."""

    def split(arguments: int, begin: int, end: int) -> None:
        a = read(arguments, ARGUMENTS)
        pair_bytes = PANELS * a.steps * WEIGHT_TERMS[number_format] * TILE_BYTES
        for pair in range(begin, end):
            _split_pair(number_format, a, a.first_pair + pair, a.weight_terms + pair * pair_bytes)

    return compiled_task(split)


@functools.cache
def _multiply_task(number_format: int) -> int:
    """Task over a group's pairs of panels, for a block of rows, then for the next one."""

    def multiply(arguments: int, begin: int, end: int) -> None:
        a = read(arguments, ARGUMENTS)
        panel_bytes, x_bytes = a.steps * WEIGHT_TERMS[number_format] * TILE_BYTES, a.steps * X_TERMS * TILE_BYTES
        room, stride = whole_lines(2 * PANELS * TOKEN_TILES, TILE_FLOATS), 4 * (a.N // 2 if a.gate else a.N)
        sums, apart = room.ctypes.data, PANELS * TOKEN_TILES * TILE_BYTES
        ups = sums + TOKEN_TILES * TILE_BYTES
        take_tiles(LANES, VECTOR_BYTES)
        for item in range(begin, end):
            pair, first = item % a.num_pairs, a.first_tile + item // a.num_pairs * a.block
            weight = a.weight_terms + pair * PANELS * panel_bytes
            column, next_column = _first_output(a, a.first_pair + pair, 0), _first_output(a, a.first_pair + pair, 1)
            last = min(a.last_tile, first + a.block)
            for tile in range(first, last, TOKEN_TILES):
                count, x = min(TOKEN_TILES, last - tile), a.x_terms + (tile - a.first_tile) * x_bytes
                row, rows = tile * LANES, min(a.T - tile * LANES, count * LANES)
                ask_to_write(a.out + row * stride + 4 * column, stride, rows)
                multiply_tiles(number_format, weight, panel_bytes, x, x_bytes, a.steps, count, sums, sums + apart)
                turn_tiles(sums, PANELS * TOKEN_TILES)
                finish(a, sums, ups, row, rows, column)
                if not a.gate and next_column < a.N:
                    finish(a, ups, ups, row, rows, next_column)
        give_tiles()
        keep(room)

    return compiled_task(multiply)


@functools.cache
def _driver(number_format: int) -> int:
    def drive(pool: int, arguments: int) -> int:
        a = read(arguments, ARGUMENTS)
        tiles, pairs = (a.T + LANES - 1) // LANES, (a.N + PANELS * LANES - 1) // (PANELS * LANES)
        tile_bytes = a.steps * X_TERMS * TILE_BYTES
        pair_bytes = PANELS * a.steps * WEIGHT_TERMS[number_format] * TILE_BYTES
        a.block = max(TOKEN_TILES, BLOCK_BYTES // tile_bytes // TOKEN_TILES * TOKEN_TILES)
        most_tiles = max(1, min(tiles, MOST_BYTES // tile_bytes // a.block * a.block))
        most_pairs = max(1, min(pairs, MOST_BYTES // pair_bytes))
        x_terms, weight_terms = whole_lines(most_tiles, tile_bytes // 4), whole_lines(most_pairs, pair_bytes // 4)
        a.x_terms, a.weight_terms = x_terms.ctypes.data, weight_terms.ctypes.data
        piece = max(1, NUMBERS_A_PIECE // (a.width * LANES))
        for first_pair in range(0, pairs, most_pairs):
            a.first_pair, a.num_pairs = first_pair, min(most_pairs, pairs - first_pair)
            run(pool, a.split_weight, arguments, a.num_pairs, piece)
            for first_tile in range(0, tiles, most_tiles):
                a.first_tile, a.last_tile = first_tile, min(tiles, first_tile + most_tiles)
                group = a.last_tile - first_tile
                run(pool, a.split_x, arguments, group, piece)
                work = min(group, a.block) * LANES * PANELS * LANES * a.width
                items = a.num_pairs * ((group + a.block - 1) // a.block)
                run(pool, a.multiply, arguments, items, max(1, MULTIPLICATIONS_A_PIECE // work))
        keep((x_terms, weight_terms))
        return 0

    return compiled_driver(drive)


def _declines(dtype: torch.dtype) -> str | None:
    return declines_floats(dtype) or declines()


@encoder_linear.kernel(device="cpu", name="numba", preference=10, supports=_declines)
def encoder_linear_numba(x_TK: Tensor, weight_NK: Tensor, fused: Fused = PLAIN) -> Tensor:
    """See ``ops.encoder_linear``."""
    bias_N, norm_K, eps, residual_TN, activation = fused
    T, (N, K) = len(x_TK), weight_NK.shape
    if activation not in GATES or (activation and N % (PANELS * LANES)):

        def multiply(normed_TK: Tensor) -> Tensor:
            return encoder_linear_numba(normed_TK, weight_NK, Fused(bias_N))

        return compose(x_TK, fused, multiply)
    number_format = format_beside("encoder_linear", x_TK, weight_NK)
    check_linear("encoder_linear", x_TK, weight_NK.shape, fused)
    x, weight = whole_vectors(x_TK.float()), whole_vectors(weight_NK)
    norm = None if norm_K is None else whole_vectors(norm_K.float())
    bias = None if bias_N is None else bias_N.float()
    residual = None if residual_TN is None else residual_TN.float()
    out_TN = residual if residual is not None else torch.empty(T, fused.width(N))
    width = x.shape[1]
    values = (
        *(address(bias), address(residual), out_TN.data_ptr(), GATES[activation], T, N),
        *(_split_x_task(), _split_weight_task(number_format), _multiply_task(number_format)),
        *(x.data_ptr(), address(norm), eps, weight.data_ptr(), K, width, -(-width // STEP)),
        *([0] * 7),
    )
    call(_driver(number_format), ARGUMENTS, values)
    return out_TN.to(x_TK.dtype)
