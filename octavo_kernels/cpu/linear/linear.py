"""``linear`` for dense weights of float32, bfloat16 and float16, in float32 arithmetic.

``multiply_rows`` also computes ``scaled_linear``.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from octavo.ops.linear.linear import PLAIN, Fused, check_linear, compose, linear
from octavo_kernels.cpu.calls import call
from octavo_kernels.cpu.compiled import Constant, compiled_task, driver, inlined, task
from octavo_kernels.cpu.linear.dense_dot import TILES, dense_dot
from octavo_kernels.cpu.linear.epilogue import EPILOGUE, GATES, finish
from octavo_kernels.cpu.memory import fields, keep, read
from octavo_kernels.cpu.rows.norms import normalise_row
from octavo_kernels.cpu.tensors import address, declines_floats, format_beside, whole_vectors
from octavo_kernels.cpu.threads import run
from octavo_kernels.cpu.vector_ir import FORMAT_BYTES, LANES

PANEL = LANES
MOST_TOKENS = TILES[0][1]
TOKENS_AT_ONCE = 96
"""Rows of activations that stay in the second-level cache while all panels are multiplied with them."""
MULTIPLICATIONS_A_PIECE = 40_000
"""One or two microseconds for a single row, whose weights come from memory."""
NUMBERS_A_PIECE = 8192

ARGUMENTS = fields(EPILOGUE, "normalise multiply x normed norm eps:float weight K width scales group G panels rows")
"""``width`` is K rounded up to a multiple of 16, and ``group`` the number of columns that share a scale, likewise. The
driver sets the last two: panels of outputs, and rows that are multiplied with all of them before the next ones."""


class WeightRows(NamedTuple):
    """A weight [N, K] as ``dense_dot`` reads it: row by row, in one number format."""

    number_format: int
    data: Tensor
    """[N, K], each row filled up with zeros to a multiple of 16 columns"""
    shape: tuple[int, int]
    scales: Tensor | None = None
    """float32 [N, G]; E4M3 only"""
    group: int = LANES
    """Number of columns that share a scale."""


@task
def _normalise_task(arguments: int, begin: int, end: int) -> None:
    """Task over rows."""
    a = read(arguments, ARGUMENTS)
    for t in range(begin, end):
        at = 4 * a.width * t
        normalise_row(a.x + at, a.norm, a.normed + at, a.width, a.K, a.eps)


@inlined
def _tile_for(left: int) -> Any:
    """The weight rows and the tokens to process at once, with so many tokens left."""
    for rows, tokens in TILES:
        if tokens <= left:
            return rows, tokens
    return 1, 1


@inlined
def _dot_rows(number_format: Constant, a: Any, first: int, last: int, x: int, tile: Any, out_at: int) -> None:
    """Weight rows ``first .. last`` times the tokens of one of TILES, into rows of 16 sums."""
    n, (most, tokens) = first, tile
    while n < last:
        rows = most if n + most <= last else 1
        weight, out = a.weight + n * a.width * FORMAT_BYTES[number_format], out_at + 4 * (n - first)
        scales = a.scales + 4 * n * a.G
        if rows == most:
            dense_dot(number_format, weight, scales, a.group, x, a.width, out, 4 * PANEL, rows, tokens)
        else:
            for t in range(tokens):
                own = out + 4 * t * PANEL
                dense_dot(number_format, weight, scales, a.group, x + 4 * t * a.width, a.width, own, 4 * PANEL, 1, 1)
        n += rows


@functools.cache
def _multiply_task(number_format: int) -> int:
    """Task over panels of 16 outputs, for a block of rows, then for the next one."""

    def multiply(arguments: int, begin: int, end: int) -> None:
        a = read(arguments, ARGUMENTS)
        tiles = np.empty((2, MOST_TOKENS, PANEL), np.float32)
        sums, ups = tiles[0].ctypes.data, tiles[1].ctypes.data
        for item in range(begin, end):
            t, first = item // a.panels * a.rows, item % a.panels * PANEL
            last = min(t + a.rows, a.T)
            while t < last:
                tile, x = _tile_for(last - t), a.normed + 4 * t * a.width
                _dot_rows(number_format, a, first, min(first + PANEL, a.N), x, tile, sums)
                if a.gate:
                    up = first + a.N // 2
                    _dot_rows(number_format, a, up, up + PANEL, x, tile, ups)
                finish(a, sums, ups, t, tile[1], first)
                t += tile[1]
        keep(tiles)

    return compiled_task(multiply)


@driver
def _driver(pool: int, arguments: int) -> int:
    a = read(arguments, ARGUMENTS)
    normed = np.empty(a.T * a.width if a.norm else 0, np.float32)
    a.normed = a.x
    if a.norm:
        a.normed = normed.ctypes.data
        run(pool, a.normalise, arguments, a.T, max(1, NUMBERS_A_PIECE // a.width))
    a.panels, a.rows = ((a.N // 2 if a.gate else a.N) + PANEL - 1) // PANEL, max(1, min(a.T, TOKENS_AT_ONCE))
    items = a.panels * ((a.T + a.rows - 1) // a.rows)
    work = a.rows * a.N * a.width // a.panels
    run(pool, a.multiply, arguments, items, max(1, MULTIPLICATIONS_A_PIECE // work))
    keep(normed)
    return 0


@linear.kernel(device="cpu", name="numba", preference=10, supports=declines_floats)
def linear_numba(x_TK: Tensor, weight_NK: Tensor, fused: Fused = PLAIN) -> Tensor:
    """See ``ops.linear``."""
    N, K = weight_NK.shape
    rows = WeightRows(format_beside("linear", x_TK, weight_NK), whole_vectors(weight_NK), (N, K))
    return multiply_rows("linear", x_TK, rows, fused)


def multiply_rows(op: str, x_TK: Tensor, weight: WeightRows, fused: Fused) -> Tensor:
    """``ops.linear`` with a weight in any number format. ``op`` is the name that errors give."""
    bias_N, norm_K, eps, residual_TN, activation = fused
    T, (N, K) = len(x_TK), weight.shape
    if activation not in GATES or (activation and N % (2 * PANEL)):

        def multiply(normed_TK: Tensor) -> Tensor:
            return multiply_rows(op, normed_TK, weight, Fused(bias_N))

        return compose(x_TK, fused, multiply)
    check_linear(op, x_TK, weight.shape, fused)
    x = whole_vectors(x_TK.float())
    norm = None if norm_K is None else whole_vectors(norm_K.float())
    bias = None if bias_N is None else bias_N.float()
    residual = None if residual_TN is None else residual_TN.float()
    out_TN = residual if residual is not None else torch.empty(T, fused.width(N))
    width, group = x.shape[1], -(-weight.group // LANES) * LANES
    values = (
        *(address(bias), address(residual), out_TN.data_ptr(), GATES[activation], T, N),
        *(_normalise_task(), _multiply_task(weight.number_format), x.data_ptr(), 0, address(norm), eps),
        *(weight.data.data_ptr(), K, width, address(weight.scales), group, -(-width // group), 0, 0),
    )
    call(_driver(), ARGUMENTS, values)
    return out_TN.to(x_TK.dtype)
