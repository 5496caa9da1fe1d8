"""``moe`` for CUDA devices: rows are sorted by expert on the device, and each run of rows meets its expert's matrix.

The host does not know the counts: the grid has as many tiles as any choice of experts could need, and tiles without
rows exit at once. So the same launches serve every step of a CUDA graph.

Shapes: T tokens, S chosen for each, P = T S pairs of a token and an expert, X experts, K inputs, N outputs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.ops.moe import ClampedSwish, Experts, moe
from octavo.ops.triton.gates import gate_and_mul
from octavo.ops.triton.launch import after_predecessor, declines_floats, is_invariant, launch

BLOCK_N, BLOCK_K = 64, 64
MAX_ROWS = 64
PAIRS_AT_ONCE = 1024
SUMS_AT_ONCE = 512
WARP = 32
"""Histograms have as many bins at least."""


class Tiles(NamedTuple):
    """Runs of pairs of one expert, on the device; int32 [tiles], those beyond the last have no rows."""

    order_P: Tensor
    """int32: pairs sorted by expert; those of one expert in any order."""
    expert: Tensor
    first: Tensor
    """Place of the first pair in the order."""
    rows: Tensor
    block: int
    """Most rows of a tile."""


def sort_into_tiles(ids_TS: Tensor, num_experts: int) -> Tiles:
    """Split the pairs of each expert into tiles. Data that depends on the ids stays on the device."""
    device, P = ids_TS.device, ids_TS.numel()
    block = MAX_ROWS if is_invariant() else min(MAX_ROWS, max(16, triton.next_power_of_2(P // num_experts)))
    num_tiles = min(P, num_experts) + P // block
    sizes = (P, num_experts, num_tiles, num_tiles, num_tiles)
    order_P, cursor_X, expert, first, rows = (torch.empty(size, dtype=torch.int32, device=device) for size in sizes)
    experts = max(triton.next_power_of_2(num_experts), WARP)
    launch(
        sort_kernel, (1,), ids_TS.contiguous(), order_P, cursor_X, expert, first, rows, P, num_experts, num_tiles,
        block, experts, PAIRS_AT_ONCE, num_warps=8,
    )  # fmt: skip
    return Tiles(order_P, expert, first, rows, block)


@triton.jit
def sort_kernel(
    ids_ptr: tl.tensor, order_ptr: tl.tensor, cursor_ptr: tl.tensor,
    expert_ptr: tl.tensor, first_ptr: tl.tensor, rows_ptr: tl.tensor,
    P: tl.tensor, X: tl.tensor, num_tiles: tl.tensor,
    BLOCK: tl.constexpr, EXPERTS: tl.constexpr, PAIRS: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """All pairs by one program: count, sum up, place. A row's result is the same at any place of its tile."""
    after_predecessor(PDL)
    e, i = tl.arange(0, EXPERTS), tl.arange(0, PAIRS)
    count_X = tl.zeros([EXPERTS], tl.int32)
    for start in range(0, P, PAIRS):
        expert = tl.load(ids_ptr + start + i, mask=start + i < P, other=0).to(tl.int32)
        count_X += tl.histogram(expert, EXPERTS, mask=start + i < P)
    first_X = tl.cumsum(count_X, 0) - count_X
    tl.atomic_xchg(cursor_ptr + e, first_X, mask=e < X)
    tiles_X = (count_X + BLOCK - 1) // BLOCK
    at_X = tl.cumsum(tiles_X, 0) - tiles_X
    for n in range(tl.max(tiles_X, 0)):
        is_tile = n < tiles_X
        tl.store(expert_ptr + at_X + n, e, mask=is_tile)
        tl.store(first_ptr + at_X + n, first_X + n * BLOCK, mask=is_tile)
        tl.store(rows_ptr + at_X + n, tl.minimum(count_X - n * BLOCK, BLOCK), mask=is_tile)
    for start in range(tl.sum(tiles_X, 0), num_tiles, PAIRS):
        tl.store(rows_ptr + start + i, tl.zeros([PAIRS], tl.int32), mask=start + i < num_tiles)
    tl.debug_barrier()  # all cursors are set
    for start in range(0, P, PAIRS):
        expert = tl.load(ids_ptr + start + i, mask=start + i < P, other=0)
        place = tl.atomic_add(cursor_ptr + expert, 1, mask=start + i < P)
        tl.store(order_ptr + place, start + i, mask=start + i < P)


@triton.jit
def expert_linear_kernel(
    x_ptr: tl.tensor, weight_ptr: tl.tensor, bias_ptr: tl.tensor, share_ptr: tl.tensor, out_ptr: tl.tensor,
    order_ptr: tl.tensor, expert_ptr: tl.tensor, first_ptr: tl.tensor, rows_ptr: tl.tensor,
    N: tl.tensor, K: tl.tensor, pairs_a_row: tl.tensor,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """BLOCK_N outputs of a tile's pairs; pair p reads row p / pairs_a_row of x and writes row p of the result."""
    after_predecessor(PDL)
    tile = tl.program_id(1)
    num_rows = tl.load(rows_ptr + tile)
    if num_rows > 0:
        expert = tl.load(expert_ptr + tile).to(tl.int64)
        m = tl.arange(0, BLOCK_M)
        pair = tl.load(order_ptr + tl.load(first_ptr + tile) + m, mask=m < num_rows, other=0).to(tl.int64)
        n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        x_row = x_ptr + (pair // pairs_a_row)[:, None] * K
        weight_row = weight_ptr + expert * N * K + n.to(tl.int64)[:, None] * K
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for start in range(0, K, BLOCK_K):
            k = (start + tl.arange(0, BLOCK_K))[None, :]
            x = tl.load(x_row + k, mask=(m < num_rows)[:, None] & (k < K), other=0.0)
            weight = tl.load(weight_row + k, mask=(n < N)[:, None] & (k < K), other=0.0)
            acc = tl.dot(x, tl.trans(weight), acc, input_precision="ieee")
        if bias_ptr is not None:
            acc += tl.load(bias_ptr + expert * N + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
        if share_ptr is not None:
            acc *= tl.load(share_ptr + pair, mask=m < num_rows, other=0.0)[:, None]
        is_inside = (m < num_rows)[:, None] & (n < N)[None, :]
        tl.store(out_ptr + pair[:, None] * N + n[None, :], acc.to(out_ptr.dtype.element_ty), mask=is_inside)


def _expert_linear(
    x: Tensor, weight_XNK: Tensor, bias_XN: Tensor | None, share_P: Tensor | None, out_PN: Tensor, tiles: Tiles
) -> Tensor:
    _, N, K = weight_XNK.shape
    grid = (triton.cdiv(N, BLOCK_N), len(tiles.expert))
    order = (tiles.order_P, tiles.expert, tiles.first, tiles.rows)
    sizes = (N, K, len(tiles.order_P) // len(x))
    launch(
        expert_linear_kernel, grid, x, weight_XNK, bias_XN, share_P, out_PN, *order, *sizes,
        tiles.block, BLOCK_N, BLOCK_K, num_warps=4, num_stages=3,
    )  # fmt: skip
    return out_PN


@triton.jit
def sum_kernel(
    parts_ptr: tl.tensor, out_ptr: tl.tensor, D: tl.tensor, pairs_a_row: tl.tensor, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Some columns of a token: the sum of its experts' results, in the order in which they were chosen."""
    t, d = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    after_predecessor(PDL)
    total = tl.zeros([BLOCK], tl.float32)
    for s in range(pairs_a_row):
        total += tl.load(parts_ptr + (t * pairs_a_row + s) * D + d, mask=d < D, other=0.0)
    tl.store(out_ptr + t * D + d, total.to(out_ptr.dtype.element_ty), mask=d < D)


def sum_experts(parts_PD: Tensor, like_TD: Tensor) -> Tensor:
    """The sums over each token's experts, in the type of the other tensor."""
    T, D = like_TD.shape
    out_TD = torch.empty_like(like_TD, memory_format=torch.contiguous_format)
    grid = (T, triton.cdiv(D, SUMS_AT_ONCE))
    launch(sum_kernel, grid, parts_PD, out_TD, D, len(parts_PD) // T, SUMS_AT_ONCE, num_warps=4)
    return out_TD


@moe.kernel(device="cuda", name="triton", preference=10, supports=declines_floats)
def moe_triton(x_TD: Tensor, ids_TS: Tensor, shares_TS: Tensor, experts: Experts) -> Tensor:
    """See ``ops.moe``; a row's sum is taken in the order in which its experts were chosen."""
    (T, D), P, width = x_TD.shape, ids_TS.numel(), experts.gate_up.shape[1]
    if not T:
        return torch.empty_like(x_TD)
    tiles = sort_into_tiles(ids_TS, len(experts.gate_up))
    gate_up = torch.empty(P, width, dtype=x_TD.dtype, device=x_TD.device)
    _expert_linear(x_TD.contiguous(), experts.gate_up, experts.gate_up_bias, None, gate_up, tiles)
    if isinstance(experts.activation, ClampedSwish):
        gated = experts.activation(gate_up)
    else:
        gated = gate_and_mul(gate_up, experts.activation)
    parts = torch.empty(P, D, dtype=torch.float32, device=x_TD.device)
    _expert_linear(gated, experts.down, experts.down_bias, shares_TS.contiguous(), parts, tiles)
    return sum_experts(parts, x_TD)
