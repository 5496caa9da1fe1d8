"""``encoder_attention`` for CUDA devices: a program has a tile of one text's rows for one head.

The softmax is taken while walking over the keys, as in ``prefill_attention``; tiles of keys begin at the text's first
row, so that a row's result is bitwise the same whatever the other texts are.

Shapes: T tokens of several texts, N heads, K kv heads, H head dim, M rows of a tile, C keys of a tile.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.ops.attention import encoder_attention
from octavo_kernels.triton.attention.prefill_attention import config_for
from octavo_kernels.triton.launch import after_predecessor, declines_floats, launch, shared_bytes
from octavo_kernels.triton.split_sums import LOG2_E, NO_SCORE


@functools.lru_cache(maxsize=8)
def _tiles(ends: tuple[int, ...], rows: int, device: torch.device) -> Tensor:
    """The first row of each tile, and the first row and the end of its text: int32 [tiles, 3]. All layers of a step
    have the same."""
    found, start = [], 0
    for end in ends:
        found += [(first, start, end) for first in range(start, end, rows)]
        start = end
    return torch.tensor(found, dtype=torch.int32, device=device)


@encoder_attention.kernel(device="cuda", name="triton", preference=10, supports=declines_floats)
def encoder_attention_triton(
    q_TNH: Tensor,
    k_TKH: Tensor,
    v_TKH: Tensor,
    ends: Sequence[int],
    scale: float,
    window: int = 0,
    bias_NM: Tensor | None = None,
) -> Tensor:
    """See ``ops.encoder_attention``."""
    T, N, H = q_TNH.shape
    q_TNH, k_TKH, v_TKH = (x if x.stride()[1:] == (H, 1) else x.contiguous() for x in (q_TNH, k_TKH, v_TKH))
    out_TNH = torch.empty(T, N, H, dtype=q_TNH.dtype, device=q_TNH.device)
    if not T:
        return out_TNH
    head_block = max(16, triton.next_power_of_2(H))
    config = config_for(q_TNH.element_size(), head_block, shared_bytes(q_TNH.device))
    tiles = _tiles(tuple(ends), config.rows, q_TNH.device)
    most = 0 if bias_NM is None else bias_NM.shape[1] // 2
    # fmt: off
    launch(
        encoder_attention_kernel, (len(tiles), N),
        q_TNH, k_TKH, v_TKH, out_TNH, tiles, bias_NM, LOG2_E.value * scale, window, most,
        q_TNH.stride(0), k_TKH.stride(0), v_TKH.stride(0), GROUP=N // k_TKH.shape[1], H=H, HEAD_BLOCK=head_block,
        ROWS=config.rows, KEYS=config.keys, HAS_WINDOW=window > 0, num_warps=config.warps,
    )
    # fmt: on
    return out_TNH


@triton.jit(do_not_specialize=["window", "most"])
def encoder_attention_kernel(
    q_ptr: tl.tensor, k_ptr: tl.tensor, v_ptr: tl.tensor, out_ptr: tl.tensor, tiles_ptr: tl.tensor,
    bias_ptr: tl.tensor, scale: tl.tensor, window: tl.tensor, most: tl.tensor, q_stride: tl.tensor,
    k_stride: tl.tensor, v_stride: tl.tensor, GROUP: tl.constexpr, H: tl.constexpr, HEAD_BLOCK: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, HAS_WINDOW: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Compute one tile of one head; ``scale`` makes powers of two of products."""
    head = tl.program_id(1)
    first = tl.load(tiles_ptr + tl.program_id(0) * 3)
    start = tl.load(tiles_ptr + tl.program_id(0) * 3 + 1)
    end = tl.load(tiles_ptr + tl.program_id(0) * 3 + 2)
    row_M = first + tl.arange(0, ROWS)
    h_H = tl.arange(0, HEAD_BLOCK)
    is_in_MH = (row_M < end)[:, None] & (h_H < H)[None, :]
    after_predecessor(PDL)
    q_MH = tl.load(q_ptr + row_M[:, None].to(tl.int64) * q_stride + head * H + h_H[None, :], mask=is_in_MH, other=0.0)
    begin, stop = start, end
    if HAS_WINDOW:  # tiles of keys begin at the same places for all rows
        begin = start + tl.maximum(first - window - start, 0) // KEYS * KEYS
        stop = tl.minimum(first + ROWS + window, end)
    acc_MH = tl.zeros([ROWS, HEAD_BLOCK], tl.float32)
    peak_M = tl.full([ROWS], NO_SCORE, tl.float32)
    sum_M = tl.zeros([ROWS], tl.float32)
    of_head = head // GROUP * H + h_H
    for at in tl.range(begin, stop, KEYS):
        key_C = at + tl.arange(0, KEYS)
        is_in_CH = (key_C < end)[:, None] & (h_H < H)[None, :]
        at_C1 = key_C[:, None].to(tl.int64)
        k_CH = tl.load(k_ptr + at_C1 * k_stride + of_head[None, :], mask=is_in_CH, other=0.0)
        v_CH = tl.load(v_ptr + at_C1 * v_stride + of_head[None, :], mask=is_in_CH, other=0.0)
        scores_MC = tl.dot(q_MH, tl.trans(k_CH), input_precision="ieee") * scale
        distance_MC = key_C[None, :] - row_M[:, None]
        if bias_ptr is not None:
            place_MC = tl.minimum(tl.maximum(distance_MC, -most), most) + most
            scores_MC += tl.load(bias_ptr + head * (2 * most + 1) + place_MC) * LOG2_E
        is_seen_MC = (key_C < end)[None, :]
        if HAS_WINDOW:
            is_seen_MC = is_seen_MC & (distance_MC <= window) & (distance_MC >= -window)
        scores_MC = tl.where(is_seen_MC, scores_MC, float("-inf"))
        top_M = tl.maximum(peak_M, tl.max(scores_MC, 1))
        weights_MC = tl.exp2(scores_MC - top_M[:, None])
        shrink_M = tl.exp2(peak_M - top_M)
        acc_MH = tl.dot(weights_MC.to(v_CH.dtype), v_CH, acc_MH * shrink_M[:, None], input_precision="ieee")
        sum_M = sum_M * shrink_M + tl.sum(weights_MC, 1)
        peak_M = top_M
    out_MH = (acc_MH / sum_M[:, None]).to(out_ptr.dtype.element_ty)
    out_stride = tl.num_programs(1) * H
    tl.store(out_ptr + row_M[:, None].to(tl.int64) * out_stride + head * H + h_H[None, :], out_MH, mask=is_in_MH)
