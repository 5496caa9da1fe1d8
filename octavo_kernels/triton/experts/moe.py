"""``moe`` for CUDA devices: few pairs of a token and an expert one by one, more in tiles of pairs of one expert.

Shapes: T tokens, S chosen for each, P = T S pairs, X experts, D model, F width of an expert.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.ops.moe import Experts, has_gates, moe
from octavo_kernels.triton.activation import activation_of
from octavo_kernels.triton.experts.expert_gemm import expert_config, expert_gemm
from octavo_kernels.triton.experts.expert_gemv import ExpertGemvConfig, moe_gemv
from octavo_kernels.triton.experts.expert_tiles import sort_into_tiles, tile_rows
from octavo_kernels.triton.launch import after_predecessor, declines_floats, is_invariant, launch

GEMV = ExpertGemvConfig()
SUMS_AT_ONCE = 512


@triton.jit
def sum_kernel(
    parts_ptr: tl.tensor, residual_ptr: tl.tensor, out_ptr: tl.tensor, D: tl.tensor, pairs_a_row: tl.tensor,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Some columns of a token: the sum of its experts' results in the order of their choice, plus the residual."""
    t, d = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    after_predecessor(PDL)
    total = tl.zeros([BLOCK], tl.float32)
    for s in range(pairs_a_row):
        total += tl.load(parts_ptr + (t * pairs_a_row + s) * D + d, mask=d < D, other=0.0)
    if residual_ptr is not None:
        total += tl.load(residual_ptr + t * D + d, mask=d < D, other=0.0).to(tl.float32)
    tl.store(out_ptr + t * D + d, total.to(out_ptr.dtype.element_ty), mask=d < D)


def sum_experts(parts_PD: Tensor, like_TD: Tensor, residual_TD: Tensor | None) -> Tensor:
    """The sums over each token's experts, in the type of the second tensor, plus the residual, which is overwritten."""
    T, D = like_TD.shape
    out_TD = torch.empty_like(like_TD) if residual_TD is None else residual_TD
    grid = (T, triton.cdiv(D, SUMS_AT_ONCE))
    launch(sum_kernel, grid, parts_PD, residual_TD, out_TD, D, len(parts_PD) // T, SUMS_AT_ONCE, num_warps=4)
    return out_TD


def are_few(ids_TS: Tensor, num_experts: int) -> bool:
    """Whether pairs are computed one by one: most have an expert for themselves, so that sorting would save little."""
    return (len(ids_TS) == 1 or 2 * ids_TS.numel() <= num_experts) and not is_invariant()


@moe.kernel(device="cuda", name="triton", preference=10, supports=declines_floats)
def moe_triton(
    x_TD: Tensor, ids_TS: Tensor, shares_TS: Tensor, experts: Experts, residual_TD: Tensor | None = None
) -> Tensor:
    """See ``ops.moe``; a row's sum is taken in the order in which its experts were chosen."""
    if not len(x_TD):
        return torch.empty_like(x_TD)
    x_TD, ids_TS, shares_TS = x_TD.contiguous(), ids_TS.contiguous(), shares_TS.contiguous()
    residual_TD = None if residual_TD is None else residual_TD.contiguous()
    X, D, F = experts.down.shape
    if are_few(ids_TS, X):
        return moe_gemv(x_TD, ids_TS, shares_TS, experts, residual_TD, GEMV)
    tiles = sort_into_tiles(ids_TS, X, tile_rows(ids_TS.numel(), X))
    gated_PF = x_TD.new_empty(ids_TS.numel(), F)
    kinds = has_gates(experts.activation), False
    gate_up, down = (expert_config(tiles.block, is_gated, x_TD.dtype) for is_gated in kinds)
    activation = activation_of(experts.activation)
    expert_gemm(x_TD, experts.gate_up, experts.gate_up_bias, None, activation, gated_PF, tiles, gate_up)
    parts_PD = x_TD.new_empty(ids_TS.numel(), D, dtype=torch.float32)
    expert_gemm(gated_PF, experts.down, experts.down_bias, shares_TS, activation_of(None), parts_PD, tiles, down)
    return sum_experts(parts_PD, x_TD, residual_TD)
