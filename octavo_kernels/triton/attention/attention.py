"""``attention`` for CUDA devices, over whole contexts or a part of each.

One fused kernel if every sequence has one row, else a kernel for each piece of the work.

Shapes: T tokens, N heads, P parts of contexts, H head dim, X = H + 1; a program's rows R.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.ops.attention.attention import HeadLayout, LayerCache, PagedRows, attention
from octavo.ops.attention.partial_attention import check_heads, merge_parts, partial_attention
from octavo.ops.collective import WHOLE_CONTEXT, ContextPart
from octavo_kernels.triton.attention.cached_rows import is_packed, pack_store
from octavo_kernels.triton.attention.decode_attention import Prologue, attend_single_rows, run_decode_attention
from octavo_kernels.triton.attention.prefill_attention import prefill_attention
from octavo_kernels.triton.attention.rotate_store import rotate_store
from octavo_kernels.triton.launch import after_predecessor, declines_floats, has_gluon, is_invariant, launch
from octavo_kernels.triton.split_sums import NO_SCORE

GLUON_ROWS = 1024
"""From this number of rows on, a kernel with larger, and fewer, tiles is faster."""
LEAST_KEYS = 16
"""Of a block of the cache, for the kernel of single rows: what tensor cores multiply at least, and it takes no more at
a time than a block has. The other looks up the block of each key."""
MERGED_ROWS = 4
"""Heads of tokens of a program that merges parts."""


@attention.kernel(device="cuda", name="triton", preference=10, supports=declines_floats)
def attention_triton(
    qkv_TW: Tensor, heads: HeadLayout, cos_TR: Tensor | None, sin_TR: Tensor | None, cache: LayerCache, rows: PagedRows
) -> Tensor:
    """See ``ops.attention``."""
    assert cache.context is None, "the cache has a part of each context"
    out_TNH = qkv_TW.new_empty(len(qkv_TW), heads.num_heads, heads.head_dim)
    _attend(qkv_TW, heads, cos_TR, sin_TR, cache, rows, out_TNH, WHOLE_CONTEXT)
    return out_TNH.view(len(qkv_TW), -1)


@partial_attention.kernel(device="cuda", name="triton", preference=10, supports=declines_floats)
def partial_attention_triton(
    qkv_TW: Tensor,
    heads: HeadLayout,
    cos_TR: Tensor | None,
    sin_TR: Tensor | None,
    cache: LayerCache,
    rows: PagedRows,
    part: ContextPart,
) -> Tensor:
    """See ``ops.partial_attention``."""
    check_heads(heads)
    shape = len(qkv_TW), heads.num_heads, heads.head_dim + 1
    out_TNX = torch.empty(shape, dtype=torch.float32, device=qkv_TW.device)
    _attend(qkv_TW, heads, cos_TR, sin_TR, cache, rows, out_TNX, part)
    return out_TNX


def _attend(
    qkv_TW: Tensor,
    heads: HeadLayout,
    cos_TR: Tensor | None,
    sin_TR: Tensor | None,
    cache: LayerCache,
    rows: PagedRows,
    out_TNX: Tensor,
    part: ContextPart,
) -> None:
    """Fill ``out``, of H numbers a head or with the logarithms of sums behind them.

    Where results may not depend on other rows, one kernel computes all rows: a token must give the same result in a
    decode step as in a recomputed chunk. Else drafts are computed row by row, by the kernel that divides long contexts
    among programs: their sequences' keys and values are then read from the second-level cache.
    """
    slot_mapping_T, block_tables_SB = rows.of(cache)
    can_be_by_row = not is_invariant() and cache.keys.shape[2] >= LEAST_KEYS
    is_by_row = can_be_by_row and (rows.max_query_len == 1 or rows.single is not None)
    if is_by_row and rows.single is None and not heads.shares_cache and not is_packed(cache.keys):
        prologue = Prologue(cos_TR, sin_TR, slot_mapping_T)
        run_decode_attention(qkv_TW, heads, prologue, cache, rows, out_TNX.view(len(out_TNX), -1), part=part)
        return
    if is_packed(cache.keys):
        q_TNH = pack_store(qkv_TW, heads, cos_TR, sin_TR, cache, slot_mapping_T)
    else:
        q_TNH = rotate_store(qkv_TW, heads, cos_TR, sin_TR, cache.keys, cache.values, slot_mapping_T, cache.scales)
    has_single = can_be_by_row and len(rows.seq_lens_S) > 1
    if has_single or is_by_row:
        attend_single_rows(q_TNH, heads, cache, rows, out_TNX, part)
        if is_by_row:
            return
    if len(q_TNH) >= GLUON_ROWS and part.size == 1 and has_gluon(q_TNH.device) and not is_invariant():
        from octavo_kernels.hopper.prefill_attention import hopper_prefill, suits

        if suits(q_TNH, heads, cache):
            bounds = rows.cu_seqlens_q[:-1], rows.cu_seqlens_q[1:]
            given = (q_TNH,), (cache.keys,), cache.values, block_tables_SB, bounds, rows.seq_lens_S
            hopper_prefill(*given, heads.scale, has_single, out_TNX)
            return
    rule = heads.scale, heads.window, heads.softcap, heads.sinks_N, cache.scales, heads.slopes_N, heads.bias_TNE
    prefill_attention(
        q_TNH,
        cache.keys,
        cache.values,
        block_tables_SB,
        rows.cu_seqlens_q,
        rows.seq_lens_S,
        *rule,
        skip_single=has_single,
        out=out_TNX,
        part=part,
    )


@merge_parts.kernel(device="cuda", name="triton", preference=10, supports=declines_floats)
def merge_parts_triton(parts_PTNX: Tensor, sinks_N: Tensor | None, dtype: torch.dtype) -> Tensor:
    """See ``ops.merge_parts``."""
    P, T, N, X = parts_PTNX.shape
    assert parts_PTNX.stride()[1:] == (N * X, X, 1), "the results of a part must lie side by side"
    out_TNH = torch.empty(T, N, X - 1, dtype=dtype, device=parts_PTNX.device)
    launch(
        merge_parts_kernel, (triton.cdiv(T * N, MERGED_ROWS),), parts_PTNX, sinks_N, out_TNH, T * N,
        parts_PTNX.stride(0), P=P, N=N, H=X - 1, HP=triton.next_power_of_2(X - 1), ROWS=MERGED_ROWS, num_warps=4,
    )  # fmt: skip
    return out_TNH


@triton.jit(do_not_specialize=["count", "part_stride"])
def merge_parts_kernel(
    parts_ptr: tl.tensor, sinks_ptr: tl.tensor, out_ptr: tl.tensor, count: tl.tensor, part_stride: tl.tensor,
    P: tl.constexpr, N: tl.constexpr, H: tl.constexpr, HP: tl.constexpr, ROWS: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Some of ``count`` = T N results."""
    row_R, h_H = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.arange(0, HP)
    is_row_R = row_R < count
    mask_RH = is_row_R[:, None] & (h_H < H)[None, :]
    peak_R = tl.full([ROWS], NO_SCORE, tl.float32)
    if sinks_ptr is not None:
        sink_R = tl.load(sinks_ptr + row_R % N, mask=is_row_R, other=0.0)
        peak_R = tl.maximum(peak_R, sink_R)
    after_predecessor(PDL)
    at_R = parts_ptr + row_R * (H + 1)
    for p in tl.static_range(P):
        log_R = tl.load(at_R + p * part_stride.to(tl.int64) + H, mask=is_row_R, other=0.0)
        peak_R = tl.maximum(peak_R, log_R)
    total_R = tl.zeros([ROWS], tl.float32)
    if sinks_ptr is not None:
        total_R = tl.exp(sink_R - peak_R)
    sums_RH = tl.zeros([ROWS, HP], tl.float32)
    for p in tl.static_range(P):
        at_part_R = at_R + p * part_stride.to(tl.int64)
        weight_R = tl.exp(tl.load(at_part_R + H, mask=is_row_R, other=0.0) - peak_R)
        total_R += weight_R
        sums_RH += weight_R[:, None] * tl.load(at_part_R[:, None] + h_H[None, :], mask=mask_RH, other=0.0)
    out_RH = (sums_RH / total_R[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + (row_R * H)[:, None] + h_H[None, :], out_RH, mask=mask_RH)
