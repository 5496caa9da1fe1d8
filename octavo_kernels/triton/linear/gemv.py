"""One row times a matrix on plain multiply-adds, with fused norm and epilogue: every weight is read once.

The matrix has numbers of 16 bits, or FP8 numbers and a scale for each of its rows.

A program owns complete rows of the weight. With a gated activation a tile of rows is as many gates as ups of the same
outputs. Either there is a program for every tile, or fewer programs walk over the tiles, loading the next one while
they sum. RMSNorm costs arithmetic alone: each program takes the sum of squares from the one row of x that it reads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from octavo.ops.linear.linear import Fused
from octavo_kernels.triton.activation import gated, squared_relu
from octavo_kernels.triton.launch import (
    launch,
    num_multiprocessors,
    prefetch_lines,
    start_successor,
    wait_for_predecessor,
)

LANES = tl.constexpr(8)
"""Numbers of 16 bits that a thread loads at once."""


@dataclass(frozen=True)
class GemvConfig:
    """Tiling parameters."""

    rows: int
    """Weight rows of a tile, a power of two; with a gated activation at least 2."""
    block_k: int
    """Columns at a time, a power of two."""
    warps: int
    programs: int = 0
    """Programs on each multiprocessor, which walk over the tiles; 0 for a program for every tile."""
    stages: int = 1
    """Tiles of a walk that are in shared memory or on their way to it; with 1 the next one is in registers."""
    release: str = "early"
    """When the next kernel may start: "early" before the sums, "late" after them."""
    prefetch: int = 0
    """Further chunks of columns, or tiles of a walk, that are brought into the cache while the predecessor runs."""


@triton.jit
def _rows_of(
    start: tl.tensor, num_outputs: tl.tensor, OUTPUTS: tl.constexpr, IS_GATED: tl.constexpr, EVEN_N: tl.constexpr
) -> tl.tensor:
    """The rows of the weight for the outputs from ``start`` on: all gates, then all ups.

    Beyond the last output is the last again.
    """
    ROWS: tl.constexpr = 2 * OUTPUTS if IS_GATED else OUTPUTS
    i = tl.arange(0, ROWS)
    row = start + i % OUTPUTS
    if not EVEN_N:
        row = tl.minimum(row, num_outputs - 1)
    if IS_GATED:
        row += (i // OUTPUTS) * num_outputs
    return row


@triton.jit
def row_starts(
    start: tl.tensor, num_outputs: tl.tensor, K: tl.constexpr, OUTPUTS: tl.constexpr, IS_GATED: tl.constexpr,
    EVEN_N: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Where the rows of the outputs from ``start`` on begin in the weight."""
    return _rows_of(start, num_outputs, OUTPUTS, IS_GATED, EVEN_N).to(tl.int64)[:, None] * K


@triton.jit
def weight_chunk(
    rows: tl.tensor, chunk: tl.tensor, is_there: tl.tensor, K: tl.constexpr, BLOCK_K: tl.constexpr
) -> tl.tensor:
    """Columns ``chunk`` of these rows; 0 beyond the last column, and everywhere if the tile does not exist.

    A thread loads as many FP8 numbers at once as it does of a row of 16 bits: else the row would have to be exchanged
    among threads, through shared memory.
    """
    k = chunk * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
    mask = is_there
    if K % BLOCK_K:
        mask = (k < K) & is_there
    at = rows + k
    if rows.dtype.element_ty.primitive_bitwidth == 8:
        at = tl.max_contiguous(at, [1, LANES])
    return tl.load(at, mask=mask, other=0.0, eviction_policy="evict_first")


@triton.jit
def _no_sums(rows: tl.tensor, BLOCK_K: tl.constexpr) -> tl.tensor:
    """Sums of these rows, one for each LANES columns of a chunk, before the first chunk."""
    SUMS: tl.constexpr = BLOCK_K // LANES if BLOCK_K > LANES else 1
    return tl.zeros([rows.shape[0], SUMS], tl.float32)


@triton.jit
def _add_products(acc: tl.tensor, weights: tl.tensor, x: tl.tensor) -> tl.tensor:
    """``acc`` with the products of a chunk, of which a thread adds up its own before anything else."""
    products = weights.to(tl.float32) * x[None, :]
    return acc + tl.sum(tl.reshape(products, [acc.shape[0], acc.shape[1], weights.shape[1] // acc.shape[1]]), 2)


@triton.jit
def column_chunk(ptr: tl.tensor, chunk: tl.tensor, K: tl.constexpr, BLOCK_K: tl.constexpr) -> tl.tensor:
    """Entries ``chunk`` of a vector of K in float32, 0 beyond its end."""
    k = chunk * BLOCK_K + tl.arange(0, BLOCK_K)
    mask = True
    if K % BLOCK_K:
        mask = k < K
    return tl.load(ptr + k, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _scales_of(
    scales_ptr: tl.tensor, start: tl.tensor, num_outputs: tl.tensor, OUTPUTS: tl.constexpr, IS_GATED: tl.constexpr,
    EVEN_N: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Scales of a tile's rows, 1 if ``scales_ptr`` is None."""
    scales = 1.0
    if scales_ptr is not None:
        scales = tl.load(scales_ptr + _rows_of(start, num_outputs, OUTPUTS, IS_GATED, EVEN_N))
    return scales


@triton.jit
def _of_outputs(
    ptr: tl.tensor, start: tl.tensor, num_outputs: tl.tensor, OUTPUTS: tl.constexpr, EVEN_N: tl.constexpr
) -> tl.tensor:
    """Entries of a tile's outputs in float32, or 0 if ``ptr`` is None."""
    if ptr is None:
        values = tl.zeros([OUTPUTS], tl.float32)
    else:
        n = start + tl.arange(0, OUTPUTS)
        mask = True
        if not EVEN_N:
            mask = n < num_outputs
        values = tl.load(ptr + n, mask=mask, other=0.0).to(tl.float32)
    return values


@triton.jit
def finish_rows(
    y: tl.tensor, residual: tl.tensor, start: tl.tensor, num_outputs: tl.tensor, bias_ptr: tl.tensor,
    out_ptr: tl.tensor, OUTPUTS: tl.constexpr, ACTIVATION: tl.constexpr, EVEN_N: tl.constexpr,
    ALPHA: tl.constexpr = 0.0, LIMIT: tl.constexpr = 0.0,
) -> None:  # fmt: skip
    """Bias, gate and residual of the sums of a tile's rows; store the outputs from ``start`` on."""
    bias = _of_outputs(bias_ptr, start, num_outputs, OUTPUTS, EVEN_N)
    if ACTIVATION is None:
        y += bias
    elif ACTIVATION == "squared_relu":
        y = squared_relu(y + bias)
    else:
        gate, up = tl.split(tl.permute(tl.reshape(y, [2, OUTPUTS]), [1, 0]))
        up_bias_ptr = bias_ptr
        if bias_ptr is not None:
            up_bias_ptr = bias_ptr + num_outputs
        up += _of_outputs(up_bias_ptr, start, num_outputs, OUTPUTS, EVEN_N)
        y = gated(gate + bias, up, ACTIVATION, ALPHA, LIMIT)
    n = start + tl.arange(0, OUTPUTS)
    mask = True
    if not EVEN_N:
        mask = n < num_outputs
    tl.store(out_ptr + n, (y + residual).to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_tiles", "late"])
def gemv_kernel(
    x_ptr: tl.tensor, weight_ptr: tl.tensor, scales_ptr: tl.tensor, bias_ptr: tl.tensor, norm_ptr: tl.tensor,
    residual_ptr: tl.tensor, out_ptr: tl.tensor, eps: tl.tensor, num_outputs: tl.tensor, num_tiles: tl.tensor,
    late: tl.tensor,
    K: tl.constexpr, OUTPUTS: tl.constexpr, BLOCK_K: tl.constexpr, ACTIVATION: tl.constexpr, EVEN_N: tl.constexpr,
    PREFETCH: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """One tile for each program, in chunks of columns; the next chunk is loaded while one is summed."""
    CHUNKS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    GATED: tl.constexpr = ACTIVATION is not None
    start = tl.program_id(0) * OUTPUTS
    rows = weight_ptr + row_starts(start, num_outputs, K, OUTPUTS, GATED, EVEN_N)
    weights = weight_chunk(rows, 0, True, K, BLOCK_K)
    scales = _scales_of(scales_ptr, start, num_outputs, OUTPUTS, GATED, EVEN_N)
    if PDL and PREFETCH and CHUNKS > 1:
        prefetch_lines(rows + BLOCK_K, K - BLOCK_K if CHUNKS - 1 < PREFETCH else PREFETCH * BLOCK_K)
    wait_for_predecessor(PDL)
    if late == 0:
        start_successor(PDL)
    residual = _of_outputs(residual_ptr, start, num_outputs, OUTPUTS, EVEN_N)
    acc = _no_sums(rows, BLOCK_K)
    squares = tl.zeros([BLOCK_K], tl.float32)
    for c in tl.static_range(CHUNKS):
        following = weights
        if c + 1 < CHUNKS:
            following = weight_chunk(rows, c + 1, True, K, BLOCK_K)
        x = column_chunk(x_ptr, c, K, BLOCK_K)
        if norm_ptr is not None:
            squares += x * x
            x *= column_chunk(norm_ptr, c, K, BLOCK_K)
        acc = _add_products(acc, weights, x)
        weights = following
    if late != 0:
        start_successor(PDL)
    y = tl.sum(acc, 1) * scales
    if norm_ptr is not None:
        y *= tl.rsqrt(tl.sum(squares, 0) / K + eps)
    finish_rows(y, residual, start, num_outputs, bias_ptr, out_ptr, OUTPUTS, ACTIVATION, EVEN_N)


@triton.jit(do_not_specialize=["num_tiles", "late"])
def walking_gemv_kernel(
    x_ptr: tl.tensor, weight_ptr: tl.tensor, scales_ptr: tl.tensor, bias_ptr: tl.tensor, norm_ptr: tl.tensor,
    residual_ptr: tl.tensor, out_ptr: tl.tensor, eps: tl.tensor, num_outputs: tl.tensor, num_tiles: tl.tensor,
    late: tl.tensor,
    K: tl.constexpr, OUTPUTS: tl.constexpr, BLOCK_K: tl.constexpr, ACTIVATION: tl.constexpr, EVEN_N: tl.constexpr,
    STAGES: tl.constexpr, PREFETCH: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """A few programs iterate over the tiles; the first chunk of x stays in registers, the others are cached."""
    CHUNKS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    GATED: tl.constexpr = ACTIVATION is not None
    first, step = tl.program_id(0), tl.num_programs(0)
    rows = weight_ptr + row_starts(first * OUTPUTS, num_outputs, K, OUTPUTS, GATED, EVEN_N)
    if STAGES == 1:
        weights = weight_chunk(rows, 0, True, K, BLOCK_K)
    if norm_ptr is not None:
        norm = column_chunk(norm_ptr, 0, K, BLOCK_K)
    if PDL and PREFETCH:
        if CHUNKS > 1 and STAGES == 1:
            prefetch_lines(rows + BLOCK_K, K - BLOCK_K)
        for p in tl.static_range(1 if STAGES == 1 else 0, 1 + PREFETCH):
            tile = tl.minimum(first + p * step, num_tiles - 1)
            prefetch_lines(weight_ptr + row_starts(tile * OUTPUTS, num_outputs, K, OUTPUTS, GATED, EVEN_N), K)
    wait_for_predecessor(PDL)
    if late == 0:
        start_successor(PDL)
    x_0 = column_chunk(x_ptr, 0, K, BLOCK_K)
    scale = 1.0
    if norm_ptr is not None:
        squares = x_0 * x_0
        for c in tl.static_range(1, CHUNKS):
            x = column_chunk(x_ptr, c, K, BLOCK_K)
            squares += x * x
        scale = tl.rsqrt(tl.sum(squares, 0) / K + eps)
        x_0 *= norm
    for tile in tl.range(first, num_tiles, step, num_stages=STAGES):
        start = tile * OUTPUTS
        if STAGES > 1:
            rows = weight_ptr + row_starts(start, num_outputs, K, OUTPUTS, GATED, EVEN_N)
        residual = _of_outputs(residual_ptr, start, num_outputs, OUTPUTS, EVEN_N)
        acc = _no_sums(rows, BLOCK_K)
        for c in tl.static_range(CHUNKS):
            if STAGES > 1:
                weights = weight_chunk(rows, c, True, K, BLOCK_K)
            elif c + 1 < CHUNKS:
                following = weight_chunk(rows, c + 1, True, K, BLOCK_K)
            else:
                rows = weight_ptr + row_starts((tile + step) * OUTPUTS, num_outputs, K, OUTPUTS, GATED, EVEN_N)
                following = weight_chunk(rows, 0, tile + step < num_tiles, K, BLOCK_K)
            x = x_0
            if c > 0:
                x = column_chunk(x_ptr, c, K, BLOCK_K)
                if norm_ptr is not None:
                    x *= column_chunk(norm_ptr, c, K, BLOCK_K)
            acc = _add_products(acc, weights, x)
            if STAGES == 1:
                weights = following
        y = tl.sum(acc, 1) * scale * _scales_of(scales_ptr, start, num_outputs, OUTPUTS, GATED, EVEN_N)
        finish_rows(y, residual, start, num_outputs, bias_ptr, out_ptr, OUTPUTS, ACTIVATION, EVEN_N)
    if late != 0:
        start_successor(PDL)


def gemv(x_1K: Tensor, weight_NK: Tensor, fused: Fused, config: GemvConfig, scales_N: Tensor | None = None) -> Tensor:
    """``ops.linear`` for one row; the residual is overwritten and returned.

    ``scales_N``: float32, of the weight's rows.
    """
    bias_N, norm_K, eps, residual_1N, activation = fused
    N, K = weight_NK.shape
    outputs, rows = fused.width(N), config.rows if activation is None else max(1, config.rows // 2)
    tiles = triton.cdiv(outputs, rows)
    programs = config.programs * num_multiprocessors(x_1K.device)
    walks = 0 < programs < tiles
    out_1N = x_1K.new_empty(1, outputs) if residual_1N is None else residual_1N
    launch(
        walking_gemv_kernel if walks else gemv_kernel, (programs if walks else tiles,),
        *(x_1K, weight_NK, scales_N, bias_N, norm_K, residual_1N, out_1N),
        *(eps, outputs, tiles, int(config.release == "late")), K=K, OUTPUTS=rows,
        BLOCK_K=min(config.block_k, triton.next_power_of_2(K)), ACTIVATION=activation, EVEN_N=outputs % rows == 0,
        PREFETCH=config.prefetch, num_warps=config.warps, **dict[str, Any](STAGES=config.stages) if walks else {},
    )  # fmt: skip
    return out_1N
