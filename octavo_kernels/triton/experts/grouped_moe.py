"""``grouped_moe`` for CUDA devices: as ``moe``, with the products of ``grouped_gemv`` and ``grouped_gemm``.

Shapes: T tokens, S chosen for each, P = T S pairs of a token and an expert, K inputs, N outputs.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.ops.linear.grouped_linear import TILE, PackedGroups, chunk_of
from octavo.ops.moe import Experts, GroupedExperts, grouped_moe, has_gates, moe
from octavo_kernels.hopper.pipelined_moe import expert_configs, pipelined_moe, takes_pairs
from octavo_kernels.triton.activation import activation_of
from octavo_kernels.triton.experts.expert_gemm import expert_config, expert_gemm
from octavo_kernels.triton.experts.expert_gemv import ExpertGemvConfig, moe_gemv
from octavo_kernels.triton.experts.expert_tiles import Tiles, sort_into_tiles, tile_rows
from octavo_kernels.triton.grouped.grouped_gemm import parts_of, sum_chunks
from octavo_kernels.triton.grouped.grouped_gemv import GroupedGemvConfig, products
from octavo_kernels.triton.grouped.grouped_linear import declines_grouped
from octavo_kernels.triton.grouped.grouped_numbers import assembly, entry_assembly, offset_of, scale_factor
from octavo_kernels.triton.launch import (
    after_predecessor,
    declines_floats,
    is_invariant,
    launch,
    no_pdl,
    num_multiprocessors,
    start_successor,
    wait_for_predecessor,
)
from octavo_kernels.triton.linear.tile_epilogue import finish

# Packed experts of a few tokens: each pair of a token and an expert by programs of its own, as in ``grouped_gemv``.
# Shapes: P pairs, X experts, K inputs, N outputs of an expert.

BLOCK_T = 8
"""Tensor cores take no fewer rows; one of them is used."""


@triton.jit(do_not_specialize=["late"])
def grouped_pair_kernel(
    x_ptr: tl.tensor, words_ptr: tl.tensor, scales_ptr: tl.tensor, zeros_ptr: tl.tensor, minima_ptr: tl.tensor,
    bias_ptr: tl.tensor, ids_ptr: tl.tensor, share_ptr: tl.tensor, out_ptr: tl.tensor,
    num_outputs: tl.tensor, num_rows: tl.tensor, pairs_a_row: tl.tensor, late: tl.tensor,
    K: tl.constexpr, GROUPS: tl.constexpr, NUMBER: tl.constexpr, OFFSET: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, SPLIT: tl.constexpr, STAGES: tl.constexpr,
    ACTIVATION: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, ASSEMBLY: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """BLOCK_N outputs of a pair that has an expert: it reads row pair / pairs_a_row of x and writes its own row of the
    result."""
    GATED: tl.constexpr = ACTIVATION is not None and ACTIVATION != "squared_relu"
    pair, start = tl.program_id(0), tl.program_id(1) * BLOCK_N
    t, outputs = tl.arange(0, BLOCK_T), start + tl.arange(0, BLOCK_N)
    wait_for_predecessor(PDL)
    if late == 0:
        start_successor(PDL)
    expert = tl.load(ids_ptr + pair).to(tl.int32)
    if expert >= 0:
        first_row = expert * num_outputs
        if GATED:
            first_row *= 2
        rows = first_row + tl.minimum(outputs, num_outputs - 1)
        acc, up = products(
            x_ptr + (pair // pairs_a_row).to(tl.int64) * K, words_ptr, scales_ptr, zeros_ptr, minima_ptr, None,
            rows, num_outputs, num_rows, 1,
            K, GROUPS, NUMBER, OFFSET, CHUNK, BLOCK_T, BLOCK_N, SPLIT, STAGES, GATED, ASSEMBLY,
        )  # fmt: skip
        if late != 0:
            start_successor(PDL)
        y, y_up = tl.sum(acc, 0), tl.sum(up, 0)
        if GROUPS == 1:
            y *= tl.load(scales_ptr + rows).to(tl.float32)[:, None]
            if GATED:
                y_up *= tl.load(scales_ptr + num_outputs + rows).to(tl.float32)[:, None]
        own_bias = bias_ptr
        if bias_ptr is not None:
            own_bias = bias_ptr + first_row
        y = finish(y, y_up, 0.0, outputs, num_outputs, own_bias, ACTIVATION, ALPHA, LIMIT)
        if share_ptr is not None:
            y *= tl.load(share_ptr + pair)
        at = out_ptr + pair.to(tl.int64) * num_outputs + outputs[:, None] + t[None, :]
        tl.store(at, y.to(out_ptr.dtype.element_ty), mask=(t < 1)[None, :] & (outputs < num_outputs)[:, None])


def grouped_pairs(
    x: Tensor,
    packed: PackedGroups,
    bias_XN: Tensor | None,
    ids: Tensor,
    shares: Tensor | None,
    activation: dict[str, Any],
    out_PN: Tensor,
    config: GroupedGemvConfig | None = None,
) -> Tensor:
    """Fill ``out``: of each pair that has an expert, with an id that is not negative, the expert's outputs, gated by an
    ``activation_of``, times the pair's share."""
    (num_rows, K), (P, N) = packed.shape, out_PN.shape
    offset = offset_of(packed, x.dtype)
    config = config or _pair_config(P * triton.cdiv(N, TILE), x.device)
    with no_pdl() if config.release == "never" else contextlib.nullcontext():
        launch(
            grouped_pair_kernel, (P, triton.cdiv(N, config.block_n)),
            *(x, packed.words, packed.scales_GN, packed.zeros_GN, packed.minima_GN, bias_XN, ids, shares, out_PN),
            *(N, num_rows, P // len(x), int(config.release == "late")), K=K, GROUPS=len(packed.scales_GN),
            NUMBER=packed.number, OFFSET=offset, CHUNK=chunk_of(packed.number), BLOCK_T=BLOCK_T, BLOCK_N=config.block_n,
            SPLIT=config.split, STAGES=config.stages, **activation, ASSEMBLY=assembly(packed, x.dtype, offset),
            num_warps=config.warps, is_early=False,  # else the kernel before leaves some multiprocessors more room
        )  # fmt: skip
    return out_PN


WARPS_EACH = 5
"""Of a multiprocessor, at least, where there are few tiles; with more, warps wait for each other's loads."""


def _pair_config(tiles: int, device: torch.device) -> GroupedGemvConfig:
    """A warp for each of so many tiles of 16 outputs, or a few that share its columns where there are few."""
    split = 1
    while split < 4 and tiles * split < WARPS_EACH * num_multiprocessors(device):
        split *= 2
    return GroupedGemvConfig(TILE, split, warps=split, stages=4 if split == 1 else 3)


BLOCK_N, STAGES, MAX_ROWS = 64, 3, 64


@triton.jit(do_not_specialize=["T"])
def grouped_expert_kernel(
    x_ptr: tl.tensor, words_ptr: tl.tensor, scales_ptr: tl.tensor, zeros_ptr: tl.tensor, minima_ptr: tl.tensor,
    bias_ptr: tl.tensor, share_ptr: tl.tensor, out_ptr: tl.tensor, order_ptr: tl.tensor, expert_ptr: tl.tensor,
    first_ptr: tl.tensor, rows_ptr: tl.tensor, T: tl.tensor, N: tl.tensor, K: tl.tensor, num_rows: tl.tensor,
    group_size: tl.tensor, num_groups: tl.tensor, pairs_a_row: tl.tensor,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WIDTH: tl.constexpr, PARTS: tl.constexpr, PER_ROW: tl.constexpr,
    NUMBER: tl.constexpr, CHUNK: tl.constexpr, EVEN_K: tl.constexpr, STAGES: tl.constexpr, ACTIVATION: tl.constexpr,
    ALPHA: tl.constexpr, LIMIT: tl.constexpr, FACTOR: tl.constexpr, ASSEMBLY: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """BLOCK_N outputs of a tile's pairs; pair p reads row p / pairs_a_row of x and writes row p of the result."""
    GATED: tl.constexpr = ACTIVATION is not None and ACTIVATION != "squared_relu"
    after_predecessor(PDL)
    tile = tl.program_id(1)
    num_pairs = tl.load(rows_ptr + tile)
    if num_pairs > 0:
        first_row = tl.load(expert_ptr + tile) * N
        if GATED:
            first_row *= 2
        m, n = tl.arange(0, BLOCK_M), tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        pair = tl.load(order_ptr + tl.load(first_ptr + tile) + m, mask=m < num_pairs, other=0).to(tl.int64)
        row = tl.where(m < num_pairs, pair // pairs_a_row, T)  # rows beyond the last are not read
        own = first_row + tl.minimum(n, N - 1)
        acc, up = sum_chunks(
            x_ptr, words_ptr, scales_ptr, zeros_ptr, minima_ptr, row, own, T, N, num_rows, K, group_size, num_groups,
            0, tl.cdiv(K, CHUNK),
            BLOCK_M, BLOCK_N, WIDTH, PARTS, PER_ROW, NUMBER, CHUNK, GATED, EVEN_K, STAGES, FACTOR, ASSEMBLY,
        )  # fmt: skip
        if PER_ROW:
            acc *= tl.load(scales_ptr + own).to(tl.float32)[:, None]
            if GATED:
                up *= tl.load(scales_ptr + N + own).to(tl.float32)[:, None]
        own_bias = bias_ptr
        if bias_ptr is not None:
            own_bias = bias_ptr + first_row
        acc = finish(acc, up, 0.0, n, N, own_bias, ACTIVATION, ALPHA, LIMIT)
        if share_ptr is not None:
            acc *= tl.load(share_ptr + pair, mask=m < num_pairs, other=0.0)[None, :]
        is_inside = (m < num_pairs)[None, :] & (n < N)[:, None]
        tl.store(out_ptr + pair[None, :] * N + n[:, None], acc.to(out_ptr.dtype.element_ty), mask=is_inside)


def _expert_linear(
    x: Tensor,
    packed: PackedGroups,
    bias: Tensor | None,
    share: Tensor | None,
    activation: dict[str, Any],
    out_PN: Tensor,
    tiles: Tiles,
) -> Tensor:
    (num_rows, K), groups, N = packed.shape, len(packed.scales_GN), out_PN.shape[1]
    launch(
        grouped_expert_kernel, (triton.cdiv(N, BLOCK_N), len(tiles.expert)),
        *(x, packed.words, packed.scales_GN, packed.zeros_GN, packed.minima_GN, bias, share, out_PN),
        *(tiles.order_P, tiles.expert, tiles.first, tiles.rows),
        *(len(x), N, K, num_rows, packed.group, groups, len(tiles.order_P) // len(x)), BLOCK_M=tiles.block,
        BLOCK_N=BLOCK_N, **parts_of(packed), STAGES=STAGES, **activation, FACTOR=scale_factor(packed, x.dtype),
        ASSEMBLY=entry_assembly(packed, x.dtype), num_warps=4,
    )  # fmt: skip
    return out_PN


@grouped_moe.kernel(device="cuda", name="triton", preference=10, supports=declines_grouped)
def grouped_moe_triton(
    x_TD: Tensor, ids_TS: Tensor, shares_TS: Tensor, experts: GroupedExperts, residual_TD: Tensor | None = None
) -> Tensor:
    """See ``ops.grouped_moe``; a row's sum is taken in the order in which its experts were chosen."""
    (T, D), P = x_TD.shape, ids_TS.numel()
    if not T:
        return torch.empty_like(x_TD)
    x_TD, ids_TS, shares_TS = x_TD.contiguous(), ids_TS.contiguous(), shares_TS.contiguous()
    residual_TD = None if residual_TD is None else residual_TD.contiguous()
    gated_PF = x_TD.new_empty(P, experts.down.shape[1])
    parts_PD = x_TD.new_empty(P, D, dtype=torch.float32)
    activation, plain = activation_of(experts.activation), activation_of(None)
    num_routed = experts.num_routed or experts.num_experts
    configs = expert_configs(x_TD, ids_TS, experts)
    if configs is not None:
        pipelined_moe(x_TD, ids_TS, shares_TS, experts, configs, gated_PF, parts_PD)
    elif takes_pairs(ids_TS, experts) and not is_invariant():
        grouped_pairs(x_TD, experts.gate_up, experts.gate_up_bias, ids_TS, None, activation, gated_PF)
        grouped_pairs(gated_PF, experts.down, experts.down_bias, ids_TS, shares_TS, plain, parts_PD)
    else:
        tiles = sort_into_tiles(ids_TS, experts.num_experts, tile_rows(P, num_routed, MAX_ROWS))
        _expert_linear(x_TD, experts.gate_up, experts.gate_up_bias, None, activation, gated_PF, tiles)
        _expert_linear(gated_PF, experts.down, experts.down_bias, shares_TS, plain, parts_PD, tiles)
    return sum_experts(parts_PD, ids_TS if experts.num_routed else None, x_TD, residual_TD)


GEMV = ExpertGemvConfig()
SUMS_AT_ONCE = 512


@triton.jit
def sum_kernel(
    parts_ptr: tl.tensor, ids_ptr: tl.tensor, residual_ptr: tl.tensor, out_ptr: tl.tensor, D: tl.tensor,
    CHOSEN: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Some columns of a token: the sum of its experts' results in the order of their choice, plus the residual."""
    t, d = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    after_predecessor(PDL)
    total = tl.zeros([BLOCK], tl.float32)
    for s in tl.static_range(CHOSEN):  # unrolled, so that all loads are under way at once
        mask = d < D
        if ids_ptr is not None:
            mask &= tl.load(ids_ptr + t * CHOSEN + s) >= 0
        total += tl.load(parts_ptr + (t * CHOSEN + s) * D + d, mask=mask, other=0.0)
    if residual_ptr is not None:
        total += tl.load(residual_ptr + t * D + d, mask=d < D, other=0.0).to(tl.float32)
    tl.store(out_ptr + t * D + d, total.to(out_ptr.dtype.element_ty), mask=d < D)


def sum_experts(parts_PD: Tensor, ids_TS: Tensor | None, like_TD: Tensor, residual_TD: Tensor | None) -> Tensor:
    """The sums over each token's experts in the type of ``like``, plus the residual, which is overwritten.

    With ``ids``, pairs with a negative one have no part.
    """
    T, D = like_TD.shape
    out_TD = torch.empty_like(like_TD) if residual_TD is None else residual_TD
    grid = (T, triton.cdiv(D, SUMS_AT_ONCE))
    chosen = len(parts_PD) // T
    launch(sum_kernel, grid, parts_PD, ids_TS, residual_TD, out_TD, D, chosen, SUMS_AT_ONCE, num_warps=4)
    return out_TD


def are_few(ids_TS: Tensor, num_routed: int) -> bool:
    """Whether pairs are computed one by one: most have an expert for themselves, so that sorting would save little."""
    return (len(ids_TS) == 1 or 2 * ids_TS.numel() <= num_routed) and not is_invariant()


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
    num_routed = experts.num_routed or X
    if are_few(ids_TS, num_routed):
        return moe_gemv(x_TD, ids_TS, shares_TS, experts, residual_TD, GEMV)
    tiles = sort_into_tiles(ids_TS, X, tile_rows(ids_TS.numel(), num_routed))
    gated_PF = x_TD.new_empty(ids_TS.numel(), F)
    kinds = has_gates(experts.activation), False
    gate_up, down = (expert_config(tiles.block, is_gated, x_TD.dtype) for is_gated in kinds)
    activation = activation_of(experts.activation)
    expert_gemm(x_TD, experts.gate_up, experts.gate_up_bias, None, activation, gated_PF, tiles, gate_up)
    parts_PD = x_TD.new_empty(ids_TS.numel(), D, dtype=torch.float32)
    expert_gemm(gated_PF, experts.down, experts.down_bias, shares_TS, activation_of(None), parts_PD, tiles, down)
    return sum_experts(parts_PD, ids_TS if experts.num_routed else None, x_TD, residual_TD)
