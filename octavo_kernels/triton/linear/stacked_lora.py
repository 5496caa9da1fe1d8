"""``stacked_lora`` for CUDA devices: one kernel from the inputs to the ranks, one from there to the outputs.

A program takes a tile of rows and goes over the adapters that occur in it, from the lowest place up: rows of one
adapter, as a prompt has them, are one product, and rows of many are as many. Which they are is read on the device.
Inputs are split among programs; each leaves its sums, and the second kernel adds them in order.

Shapes: T rows, K inputs, N outputs, P parts, A places, R highest rank, Q splits; a tile's rows M, ranks L, outputs C.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.ops.linear.linear import LowRankStack, stacked_lora
from octavo_kernels.triton.launch import after_predecessor, declines_floats, is_invariant, launch

FEW_ROWS = 128
"""Up to here tiles have the fewest rows that tensor cores take."""
MAX_RANKS = 64
"""Ranks that a program takes at once; a quarter of that in float32, whose products are made of multiply-adds."""
BLOCK_K = 64
MAX_SPLITS = 16
ENOUGH_PROGRAMS = 512
BEYOND = tl.constexpr(2**31 - 1)
"""Above every place."""


@stacked_lora.kernel(device="cuda", name="triton", preference=10, supports=declines_floats)
def stacked_lora_triton(y_TN: Tensor, x_TK: Tensor, places_T: Tensor, stack: LowRankStack) -> Tensor:
    """See ``ops.stacked_lora``."""
    (T, K), N, (_, P, R, _) = x_TK.shape, y_TN.shape[1], stack.down_APRK.shape
    assert y_TN.stride(1) == x_TK.stride(1) == 1, "the columns of a row must lie side by side"
    assert stack.down_APRK.is_contiguous()
    assert stack.up_ANR.is_contiguous()
    if T == 0:
        return y_TN
    block_m = 16 if T <= FEW_ROWS or is_invariant() else 64
    is_wide = x_TK.dtype == torch.float32
    block_r = min(MAX_RANKS // 4 if is_wide else MAX_RANKS, max(16, triton.next_power_of_2(R)))
    block_n = 128 // (2 if is_wide else 1) // (2 if block_m > 16 else 1)
    tiles, rank_tiles = triton.cdiv(T, block_m), triton.cdiv(R, block_r)
    splits = max(1, min(MAX_SPLITS, K // (4 * BLOCK_K)))  # by the map alone, so that all rows are summed alike
    if not is_invariant():
        splits = max(1, min(splits, ENOUGH_PROGRAMS // (tiles * P * rank_tiles)))
    sums_QTPR = torch.empty(splits, T, P, R, dtype=torch.float32, device=x_TK.device)
    # fmt: off
    launch(
        shrink_kernel, (tiles, splits, P * rank_tiles),
        x_TK, places_T, stack.down_APRK, sums_QTPR, T, x_TK.stride(0),
        K=K, P=P, R=R, BLOCK_M=block_m, BLOCK_R=block_r, BLOCK_K=BLOCK_K, num_warps=4, num_stages=3,
    )
    launch(
        expand_kernel, (tiles, triton.cdiv(stack.widest, block_n), P),
        y_TN, places_T, stack.up_ANR, stack.parts_P2, sums_QTPR, T, splits, N, y_TN.stride(0),
        P=P, R=R, BLOCK_M=block_m, BLOCK_R=block_r, BLOCK_N=block_n, num_warps=4 if block_m == 16 else 8,
    )
    # fmt: on
    return y_TN


@triton.jit
def _next_place(places_M: tl.tensor, after: tl.tensor) -> tl.tensor:
    """The lowest place of a tile's rows above ``after``; BEYOND if there is none."""
    return tl.min(tl.where(places_M > after, places_M, BEYOND), 0)


@triton.jit(do_not_specialize=["T"])
def shrink_kernel(
    x_ptr: tl.tensor, places_ptr: tl.tensor, down_ptr: tl.tensor, sums_ptr: tl.tensor, T: tl.tensor,
    x_stride: tl.tensor, K: tl.constexpr, P: tl.constexpr, R: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Some ranks of one part for a tile of rows: the products of one split of the inputs."""
    RANK_TILES: tl.constexpr = (R + BLOCK_R - 1) // BLOCK_R
    CHUNKS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    split, part = tl.program_id(1), tl.program_id(2) // RANK_TILES
    row_M = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    rank_L = tl.program_id(2) % RANK_TILES * BLOCK_R + tl.arange(0, BLOCK_R)
    begin = split * CHUNKS // tl.num_programs(1) * BLOCK_K
    end = (split + 1) * CHUNKS // tl.num_programs(1) * BLOCK_K
    after_predecessor(PDL)
    places_M = tl.load(places_ptr + row_M, mask=row_M < T, other=-1)
    x_M1 = x_ptr + (row_M.to(tl.int64) * x_stride)[:, None]
    sums_ML = sums_ptr + ((split * T + row_M).to(tl.int64) * P + part)[:, None] * R + rank_L[None, :]
    place = _next_place(places_M, -1)
    while place < BEYOND:
        is_own_M1 = (places_M == place)[:, None]
        down_L1 = down_ptr + ((place.to(tl.int64) * P + part) * R + rank_L)[:, None] * K
        acc_ML = tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
        for start in tl.range(begin, end, BLOCK_K):
            k_1K = start + tl.arange(0, BLOCK_K)[None, :]
            x_MK = tl.load(x_M1 + k_1K, mask=is_own_M1 & (k_1K < K), other=0.0)
            down_LK = tl.load(down_L1 + k_1K, mask=(rank_L < R)[:, None] & (k_1K < K), other=0.0)
            acc_ML = tl.dot(x_MK, tl.trans(down_LK), acc_ML, input_precision="ieee")
        tl.store(sums_ML, acc_ML, mask=is_own_M1 & (rank_L < R)[None, :])
        place = _next_place(places_M, place)


@triton.jit(do_not_specialize=["T", "splits"])
def expand_kernel(
    y_ptr: tl.tensor, places_ptr: tl.tensor, up_ptr: tl.tensor, parts_ptr: tl.tensor, sums_ptr: tl.tensor,
    T: tl.tensor, splits: tl.tensor, N: tl.tensor, y_stride: tl.tensor, P: tl.constexpr, R: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Some outputs of one part for a tile of rows."""
    part = tl.program_id(2)
    row_M = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    rank_L = tl.arange(0, BLOCK_R)
    first, size = tl.load(parts_ptr + 2 * part), tl.load(parts_ptr + 2 * part + 1)
    in_part_C = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    output_C = first + in_part_C
    after_predecessor(PDL)
    places_M = tl.load(places_ptr + row_M, mask=row_M < T, other=-1)
    y_MC = y_ptr + (row_M.to(tl.int64) * y_stride)[:, None] + output_C[None, :]
    place = _next_place(places_M, -1)
    if tl.program_id(1) * BLOCK_N >= size:
        place = BEYOND
    while place < BEYOND:
        is_own_M1 = (places_M == place)[:, None]
        up_C1 = up_ptr + (place.to(tl.int64) * N + output_C)[:, None] * R
        acc_MC = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for start in range(0, R, BLOCK_R):
            is_rank_1L = (start + rank_L < R)[None, :]
            low_ML = tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
            for split in range(splits):
                at_M = (split * T + row_M).to(tl.int64) * P + part
                low_ML += tl.load(
                    sums_ptr + at_M[:, None] * R + start + rank_L[None, :], mask=is_own_M1 & is_rank_1L, other=0.0
                )
            up_CL = tl.load(up_C1 + start + rank_L[None, :], mask=(in_part_C < size)[:, None] & is_rank_1L, other=0.0)
            acc_MC = tl.dot(low_ML.to(up_CL.dtype), tl.trans(up_CL), acc_MC, input_precision="ieee")
        mask_MC = is_own_M1 & (in_part_C < size)[None, :]
        y = tl.load(y_MC, mask=mask_MC, other=0.0).to(tl.float32)
        tl.store(y_MC, (y + acc_MC).to(y_ptr.dtype.element_ty), mask=mask_MC)
        place = _next_place(places_M, place)
