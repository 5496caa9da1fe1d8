"""A few rows, or some hundred, times a matrix on tensor cores, with fused norm and epilogue.

Shapes: T rows, K inputs, N outputs. The weight takes the wide side of the products, weight @ x.T, so that rows may be
padded to 8, 16, 32 or 64 only; many are split into tiles of up to 256. Where N gives too few programs, K is split among
several; the last to finish adds their sums, always in the order of the splits, so that results do not vary from run to
run.

Both matrices may be of 8 bits, with a scale for each row of x and of the weight.

RMSNorm may be fused: x is multiplied by the norm's weight and rounded on its way to the tensor cores, its squares are
summed alongside, and the sums are scaled at the end.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from octavo.ops.linear.linear import Fused
from octavo_kernels.triton.launch import (
    counters,
    launch,
    prefetch_lines,
    shared_bytes,
    start_successor,
    wait_for_predecessor,
)
from octavo_kernels.triton.linear.tile_epilogue import add_splits, finish, residual_tile, store_split

MAX_TILES = 1 << 16
"""Tiles of a product whose sums are split; each has a counter."""
SHARED_BY_COMPILER = 1024
"""Bytes of shared memory that the compiler may take for itself."""
COPY_ENGINE_BYTES = 16
"""What addresses and rows of the tensor memory accelerator must be multiples of."""
GROUP = 8
"""Tiles of N that run side by side over all rows, so that both operands stay in the cache."""


@dataclass(frozen=True)
class SkinnyConfig:
    """Tiling parameters."""

    block_n: int
    """Outputs of a tile: 64 or 128."""
    block_k: int
    """Columns at a time, a power of two from 16 on."""
    warps: int
    stages: int
    """Chunks of columns in shared memory at once, if there is room."""
    splits: int = 1
    """Programs that share the columns of a tile."""
    copy_engine: bool = False
    """Whether tiles are fetched by the tensor memory accelerator, where the matrices suit it."""
    fuses_norm: bool = False
    """Whether RMSNorm is fused (in bfloat16 only: float16 could overflow), or has its own kernel."""
    release: str = "early"
    """When the next kernel may start: "early" before the products, "late" after them."""
    prefetch: int = 0
    """Chunks of columns that are brought into the cache while the kernel before this one runs."""
    block_t: int = 0
    """Rows of a tile; 0 for one tile of all rows, filled up to their bucket."""


@triton.jit
def weight_tile(
    weight_ptr: tl.tensor, weight_tiles: tl.tensor, row: tl.tensor, last_row: tl.tensor, k: tl.tensor, K: tl.tensor,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """[BLOCK_N, BLOCK_K] of the weight; rows beyond the last are anything, columns beyond it are 0."""
    if weight_tiles is None:
        rows = tl.minimum(row + tl.arange(0, BLOCK_N), last_row).to(tl.int64)[:, None]
        columns = k + tl.arange(0, BLOCK_K)[None, :]
        mask = True
        if not EVEN_K:
            mask = columns < K
        tile = tl.load(weight_ptr + rows * K + columns, mask=mask, other=0.0, eviction_policy="evict_first")
    else:
        tile = weight_tiles.load([row, k])
    return tile


@triton.jit
def _x_tile(
    x_ptr: tl.tensor, x_tiles: tl.tensor, row: tl.tensor, T: tl.tensor, k: tl.tensor, K: tl.tensor,
    BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """[BLOCK_T, BLOCK_K] of x; rows and columns beyond the last are 0."""
    if x_tiles is None:
        rows = row + tl.arange(0, BLOCK_T)[:, None]
        columns = k + tl.arange(0, BLOCK_K)[None, :]
        mask = rows < T
        if not EVEN_K:
            mask &= columns < K
        tile = tl.load(x_ptr + rows.to(tl.int64) * K + columns, mask=mask, other=0.0)
    else:
        tile = x_tiles.load([row, k])
    return tile


@triton.jit
def _sum_chunks(
    x_ptr: tl.tensor, x_tiles: tl.tensor, weight_ptr: tl.tensor, weight_tiles: tl.tensor, norm_ptr: tl.tensor,
    t: tl.tensor, n: tl.tensor, T: tl.tensor, num_outputs: tl.tensor, K: tl.tensor, first: tl.tensor, last: tl.tensor,
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GATED: tl.constexpr, EVEN_K: tl.constexpr,
    STAGES: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Products of chunks ``first`` to ``last`` of the columns: the outputs or gates, the ups, and x's squares."""
    SUM: tl.constexpr = tl.int32 if weight_ptr.dtype.element_ty == tl.int8 else tl.float32
    acc, up = tl.zeros([BLOCK_N, BLOCK_T], SUM), tl.zeros([BLOCK_N, BLOCK_T], SUM)
    squares = tl.zeros([BLOCK_T, BLOCK_K // 8], tl.float32)
    for chunk in tl.range(first, last, num_stages=STAGES):
        k = chunk * BLOCK_K
        weight = weight_tile(weight_ptr, weight_tiles, n, num_outputs - 1, k, K, BLOCK_N, BLOCK_K, EVEN_K)
        x = _x_tile(x_ptr, x_tiles, t, T, k, K, BLOCK_T, BLOCK_K, EVEN_K)
        if norm_ptr is not None:
            columns = k + tl.arange(0, BLOCK_K)
            norm = tl.load(norm_ptr + columns, mask=columns < K, other=0.0).to(tl.float32)
            wide = x.to(tl.float32)
            squares += tl.sum(tl.reshape(wide * wide, [BLOCK_T, BLOCK_K // 8, 8]), 2)
            x = (wide * norm[None, :]).to(x.dtype)
        acc = tl.dot(weight, tl.trans(x), acc, input_precision="ieee", out_dtype=SUM)
        if GATED:
            last_row = 2 * num_outputs - 1
            weight = weight_tile(weight_ptr, weight_tiles, num_outputs + n, last_row, k, K, BLOCK_N, BLOCK_K, EVEN_K)
            up = tl.dot(weight, tl.trans(x), up, input_precision="ieee", out_dtype=SUM)
    return acc.to(tl.float32), up.to(tl.float32), tl.sum(squares, 1)


@triton.jit
def _prefetch(
    weight_ptr: tl.tensor, outputs: tl.tensor, num_outputs: tl.tensor, k: tl.tensor, K: tl.tensor,
    COLUMNS: tl.constexpr, GATED: tl.constexpr,
) -> None:  # fmt: skip
    """Bring the first COLUMNS from ``k`` on of a tile's weight rows into the cache."""
    at = weight_ptr + tl.minimum(outputs, num_outputs - 1).to(tl.int64)[:, None] * K + k
    prefetch_lines(at, COLUMNS)
    if GATED:
        prefetch_lines(at + num_outputs.to(tl.int64) * K, COLUMNS)


@triton.jit
def _scaled(
    acc: tl.tensor, up: tl.tensor, squares: tl.tensor, x_scales_ptr: tl.tensor, scales_ptr: tl.tensor, rows: tl.tensor,
    outputs: tl.tensor, T: tl.tensor, num_outputs: tl.tensor, K: tl.tensor, eps: tl.tensor, GATED: tl.constexpr,
    HAS_NORM: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Sums of outputs or gates, and of ups, with the scales of both matrices and that of the norm."""
    if scales_ptr is not None:
        x_scales = tl.load(x_scales_ptr + tl.minimum(rows, T - 1))[None, :]
        scales_at = scales_ptr + tl.minimum(outputs, num_outputs - 1)
        acc *= tl.load(scales_at)[:, None] * x_scales
        if GATED:
            up *= tl.load(scales_at + num_outputs)[:, None] * x_scales
    if HAS_NORM:
        factors = tl.rsqrt(squares / K + eps)[None, :]
        acc, up = acc * factors, up * factors
    return acc, up


@triton.jit
def place(tile: tl.tensor, tiles_n: tl.tensor, tiles_t: tl.tensor, GROUP: tl.constexpr) -> tl.tensor:
    """Which tile of N and which of T: GROUP tiles of N side by side over all rows, then the next ones."""
    in_group = tile % (GROUP * tiles_t)
    first = (tile - in_group) // tiles_t
    beside = tl.minimum(tiles_n - first, GROUP)
    return first + in_group % beside, in_group // beside


@triton.jit(do_not_specialize=["T", "late"])
def skinny_kernel(
    x_ptr: tl.tensor, x_tiles: tl.tensor, x_scales_ptr: tl.tensor, weight_ptr: tl.tensor, weight_tiles: tl.tensor,
    scales_ptr: tl.tensor, bias_ptr: tl.tensor, norm_ptr: tl.tensor, residual_ptr: tl.tensor, out_ptr: tl.tensor,
    sums_ptr: tl.tensor, counters_ptr: tl.tensor, eps: tl.tensor, T: tl.tensor, num_outputs: tl.tensor, K: tl.tensor,
    late: tl.tensor, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLITS: tl.constexpr,
    SPLITS_IN_TURN: tl.constexpr, ACTIVATION: tl.constexpr, EVEN_K: tl.constexpr, STAGES: tl.constexpr,
    GROUP: tl.constexpr, PREFETCH: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """One tile [BLOCK_T, BLOCK_N] of the output with SPLITS_IN_TURN, else one split of it; the same bits either way.

    ``sums`` holds for each tile and split the sums [1 or 2, BLOCK_N, BLOCK_T], and behind them the squares [BLOCK_T].
    """
    GATED: tl.constexpr = ACTIVATION is not None
    HAS_NORM: tl.constexpr = norm_ptr is not None
    SUMS: tl.constexpr = (2 if GATED else 1) * BLOCK_N * BLOCK_T
    chunks = tl.cdiv(K, BLOCK_K)
    tile, split = tl.program_id(0), tl.program_id(1)
    tile_n, tile_t = place(tile, tl.cdiv(num_outputs, BLOCK_N), tl.cdiv(T, BLOCK_T), GROUP)
    n, t = tile_n * BLOCK_N, tile_t * BLOCK_T
    rows, outputs = t + tl.arange(0, BLOCK_T), n + tl.arange(0, BLOCK_N)
    if PDL and PREFETCH:
        k = split * chunks // SPLITS * BLOCK_K
        _prefetch(weight_ptr, outputs, num_outputs, k, K, PREFETCH * BLOCK_K, GATED)
    wait_for_predecessor(PDL)
    if late == 0:
        start_successor(PDL)
    acc, up, squares = _sum_chunks(
        x_ptr, x_tiles, weight_ptr, weight_tiles, norm_ptr, t, n, T, num_outputs, K,
        split * chunks // SPLITS, (split + 1) * chunks // SPLITS, BLOCK_T, BLOCK_N, BLOCK_K, GATED, EVEN_K, STAGES,
    )  # fmt: skip
    if SPLITS_IN_TURN:
        for s in range(1, SPLITS):
            acc_s, up_s, _ = _sum_chunks(
                x_ptr, x_tiles, weight_ptr, weight_tiles, norm_ptr, t, n, T, num_outputs, K,
                s * chunks // SPLITS, (s + 1) * chunks // SPLITS, BLOCK_T, BLOCK_N, BLOCK_K, GATED, EVEN_K, STAGES,
            )  # fmt: skip
            acc, up = acc + acc_s, up + up_s
    if late != 0:
        start_successor(PDL)
    is_last = True
    if SPLITS > 1 and not SPLITS_IN_TURN:
        at = sums_ptr + tile.to(tl.int64) * SPLITS * SUMS
        at += tl.arange(0, BLOCK_N)[:, None] * BLOCK_T + tl.arange(0, BLOCK_T)[None, :]
        at_squares = sums_ptr + tl.num_programs(0).to(tl.int64) * SPLITS * SUMS
        at_squares += tile * SPLITS * BLOCK_T + tl.arange(0, BLOCK_T)
        is_last = store_split(
            acc, up, squares, at, at_squares, split, counters_ptr + tile, SUMS, SPLITS, GATED, HAS_NORM
        )
    if is_last:
        at_out = rows.to(tl.int64)[None, :] * num_outputs + outputs[:, None]
        mask = (rows < T)[None, :] & (outputs < num_outputs)[:, None]
        residual = residual_tile(residual_ptr, at_out, mask)
        if SPLITS > 1 and not SPLITS_IN_TURN:
            tl.store(counters_ptr + tile, 0)
            acc, up, squares = add_splits(acc, up, squares, at, at_squares, SUMS, SPLITS, GATED, HAS_NORM)
        acc, up = _scaled(
            acc, up, squares, x_scales_ptr, scales_ptr, rows, outputs, T, num_outputs, K, eps, GATED, HAS_NORM
        )
        acc = finish(acc, up, residual, outputs, num_outputs, bias_ptr, ACTIVATION)
        tl.store(out_ptr + at_out, acc.to(out_ptr.dtype.element_ty), mask=mask)


def skinny_gemm(
    x_TK: Tensor,
    weight_NK: Tensor,
    fused: Fused,
    config: SkinnyConfig,
    block_t: int,
    splits_in_turn: bool = False,
    out_dtype: torch.dtype | None = None,
    scales: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """``ops.linear`` in tiles of ``block_t`` rows; the residual is overwritten and returned.

    Matrices of 8 bits have ``scales``: one for each row of x, and one for each row of the weight. A result without a
    residual is of x's dtype, or of ``out_dtype``. With ``splits_in_turn`` one program sums the
    splits of a tile one after the other, to the same bits. The norm is fused whatever the configuration says. Raises
    ``AssertionError`` for more than MAX_TILES tiles that are split.
    """
    bias_N, norm_K, eps, residual_TN, activation = fused
    (T, K), outputs = x_TK.shape, fused.width(len(weight_NK))
    out_TN = x_TK.new_empty(T, outputs, dtype=out_dtype) if residual_TN is None else residual_TN
    tiles = triton.cdiv(outputs, config.block_n) * triton.cdiv(T, block_t)
    is_split = config.splits > 1 and not splits_in_turn
    assert tiles <= MAX_TILES or not is_split, f"{tiles} tiles are more than {MAX_TILES}"
    copy_engine = config.copy_engine and suits_copy_engine(x_TK, weight_NK)
    chunk = ((1 if activation is None else 2) * config.block_n + block_t) * config.block_k * x_TK.element_size()
    stages = max(1, min(config.stages, (shared_bytes(x_TK.device) - SHARED_BY_COMPILER) // chunk))
    values = ((1 if activation is None else 2) * config.block_n + 1) * block_t
    launch(
        skinny_kernel, (tiles, config.splits if is_split else 1), x_TK,
        TensorDescriptor.from_tensor(x_TK, [block_t, config.block_k]) if copy_engine else None,
        None if scales is None else scales[0], weight_NK,
        TensorDescriptor.from_tensor(weight_NK, [config.block_n, config.block_k]) if copy_engine else None,
        *(None if scales is None else scales[1], bias_N, norm_K, residual_TN, out_TN),
        x_TK.new_empty(tiles * config.splits * values, dtype=torch.float32) if is_split else None,
        counters(x_TK.device, MAX_TILES) if is_split else None, *(eps, T, outputs, K, int(config.release == "late")),
        BLOCK_T=block_t, BLOCK_N=config.block_n, BLOCK_K=config.block_k, SPLITS=config.splits,
        SPLITS_IN_TURN=splits_in_turn, ACTIVATION=activation, EVEN_K=K % config.block_k == 0, STAGES=stages,
        GROUP=GROUP, PREFETCH=config.prefetch, num_warps=config.warps,
    )  # fmt: skip
    return out_TN


def suits_copy_engine(*matrices: Tensor) -> bool:
    """Whether the tensor memory accelerator can fetch tiles of these."""
    return all(
        m.data_ptr() % COPY_ENGINE_BYTES == 0 and m.stride(0) * m.element_size() % COPY_ENGINE_BYTES == 0
        for m in matrices
    )
