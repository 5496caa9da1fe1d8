"""Products of tiles of pairs with their experts' matrices on tensor cores.

As in ``skinny_gemm``, the weight takes the wide side of the products, weight @ x.T, so that an expert with few rows
costs little more than reading its matrix.

Shapes: T tokens, P pairs of a token and an expert, X experts, K inputs, N outputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from octavo_kernels.triton.experts.expert_tiles import Tiles
from octavo_kernels.triton.launch import launch, prefetch_lines, start_successor, wait_for_predecessor
from octavo_kernels.triton.linear.skinny_gemm import suits_copy_engine, weight_tile
from octavo_kernels.triton.linear.tile_epilogue import finish


@dataclass(frozen=True)
class ExpertGemmConfig:
    """Tiling parameters."""

    block_n: int
    """Outputs of a tile: 32, 64 or 128; with a gate as many gates and ups."""
    block_k: int
    """Columns at a time, a power of two from 16 on."""
    warps: int
    stages: int
    """Chunks of columns in shared memory at once."""
    copy_engine: bool = False
    """Whether the weight is fetched by the tensor memory accelerator, where it suits it."""


@triton.jit
def _sum_chunks(
    x_at: tl.tensor, is_row: tl.tensor, weight_ptr: tl.tensor, weight_tiles: tl.tensor, row: tl.tensor,
    num_outputs: tl.tensor, last_row: tl.tensor, K: tl.tensor,
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GATED: tl.constexpr, EVEN_K: tl.constexpr,
    STAGES: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Products of the weight's rows from ``row`` on, the outputs or gates, and of the ups."""
    acc = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
    up = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
    for k in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        weight = weight_tile(weight_ptr, weight_tiles, row, last_row, k, K, BLOCK_N, BLOCK_K, EVEN_K)
        columns = k + tl.arange(0, BLOCK_K)[None, :]
        mask = is_row[:, None]
        if not EVEN_K:
            mask &= columns < K
        x = tl.load(x_at + columns, mask=mask, other=0.0)
        acc = tl.dot(weight, tl.trans(x), acc, input_precision="ieee")
        if GATED:
            weight = weight_tile(weight_ptr, weight_tiles, row + num_outputs, last_row, k, K, BLOCK_N, BLOCK_K, EVEN_K)
            up = tl.dot(weight, tl.trans(x), up, input_precision="ieee")
    return acc, up


@triton.jit
def expert_gemm_kernel(
    x_ptr: tl.tensor, weight_ptr: tl.tensor, weight_tiles: tl.tensor, bias_ptr: tl.tensor, share_ptr: tl.tensor,
    out_ptr: tl.tensor, order_ptr: tl.tensor, expert_ptr: tl.tensor, first_ptr: tl.tensor, rows_ptr: tl.tensor,
    num_outputs: tl.tensor, K: tl.tensor, pairs_a_row: tl.tensor,
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, ACTIVATION: tl.constexpr,
    ALPHA: tl.constexpr, LIMIT: tl.constexpr, EVEN_K: tl.constexpr, STAGES: tl.constexpr, TILES_ARE_OLD: tl.constexpr,
    PDL: tl.constexpr,
) -> None:  # fmt: skip
    """BLOCK_N outputs of a tile's pairs; pair p reads row p / pairs_a_row of x and writes row p of the result.

    With TILES_ARE_OLD the kernel before this one has not written the tiles.
    """
    GATED: tl.constexpr = ACTIVATION is not None and ACTIVATION != "squared_relu"
    if not TILES_ARE_OLD:
        wait_for_predecessor(PDL)
    tile, n = tl.program_id(1), tl.program_id(0) * BLOCK_N
    num_rows = tl.load(rows_ptr + tile)
    if num_rows > 0:
        expert, first = tl.load(expert_ptr + tile), tl.load(first_ptr + tile)
        m, outputs = tl.arange(0, BLOCK_T), n + tl.arange(0, BLOCK_N)
        is_row = m < num_rows
        pair = tl.load(order_ptr + first + m, mask=is_row, other=0)
        x_at = x_ptr + (pair // pairs_a_row).to(tl.int64)[:, None] * K
        rows_an_expert = num_outputs
        if GATED:
            rows_an_expert = 2 * num_outputs
        row = expert * rows_an_expert
        if TILES_ARE_OLD:
            if PDL:
                own = row + tl.minimum(outputs, num_outputs - 1)
                prefetch_lines(weight_ptr + own.to(tl.int64)[:, None] * K, BLOCK_K)
            wait_for_predecessor(PDL)
        start_successor(PDL)
        acc, up = _sum_chunks(
            x_at, is_row, weight_ptr, weight_tiles, row + n, num_outputs, row + rows_an_expert - 1, K,
            BLOCK_T, BLOCK_N, BLOCK_K, GATED, EVEN_K, STAGES,
        )  # fmt: skip
        own_bias = bias_ptr
        if bias_ptr is not None:
            own_bias = bias_ptr + row
        acc = finish(acc, up, 0.0, outputs, num_outputs, own_bias, ACTIVATION, ALPHA, LIMIT)
        if share_ptr is not None:
            acc *= tl.load(share_ptr + pair, mask=is_row, other=0.0)[None, :]
        at = out_ptr + pair.to(tl.int64)[None, :] * num_outputs + outputs[:, None]
        tl.store(at, acc.to(out_ptr.dtype.element_ty), mask=is_row[None, :] & (outputs < num_outputs)[:, None])


def expert_gemm(
    x: Tensor,
    weight_XNK: Tensor,
    bias_XN: Tensor | None,
    share_P: Tensor | None,
    activation: dict[str, Any],
    out_PN: Tensor,
    tiles: Tiles,
    config: ExpertGemmConfig,
) -> Tensor:
    """Fill ``out``: of each pair the expert's outputs, gated by an ``activation_of``, times the pair's share.

    With ``share`` at least one kernel must have run since ``tiles`` were made.
    """
    X, N, K = weight_XNK.shape
    weight = weight_XNK.view(X * N, K)
    uses_copy_engine = config.copy_engine and suits_copy_engine(weight)
    outputs = out_PN.shape[1]
    launch(
        expert_gemm_kernel, (triton.cdiv(outputs, config.block_n), len(tiles.expert)), *(x, weight),
        TensorDescriptor.from_tensor(weight, [config.block_n, config.block_k]) if uses_copy_engine else None,
        *(bias_XN, share_P, out_PN, tiles.order_P, tiles.expert, tiles.first, tiles.rows),
        *(outputs, K, len(tiles.order_P) // len(x)), BLOCK_T=tiles.block, BLOCK_N=config.block_n,
        BLOCK_K=config.block_k, **activation, EVEN_K=K % config.block_k == 0, STAGES=config.stages,
        TILES_ARE_OLD=share_P is not None, num_warps=config.warps,
    )  # fmt: skip
    return out_PN


def expert_config(block: int, is_gated: bool, dtype: torch.dtype) -> ExpertGemmConfig:
    """The configuration for tiles of up to ``block`` rows."""
    if dtype == torch.float32:
        return ExpertGemmConfig(32, 32, warps=4, stages=2)
    if block <= 32:
        return ExpertGemmConfig(64 if is_gated else 128, 64, warps=4, stages=4, copy_engine=True)
    return ExpertGemmConfig(64 if is_gated else 128, 64, warps=8, stages=4, copy_engine=True)
