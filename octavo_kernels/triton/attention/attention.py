"""``attention`` for CUDA devices: one fused kernel if every sequence has one row, else a kernel for each part."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.ops.attention import HeadLayout, LayerCache, PagedRows, attention
from octavo_kernels.triton.attention.cached_rows import is_packed, pack_store
from octavo_kernels.triton.attention.decode_attention import attend_single_rows, decode_attention
from octavo_kernels.triton.attention.prefill_attention import prefill_attention
from octavo_kernels.triton.attention.rotate_store import rotate_store
from octavo_kernels.triton.launch import declines_floats, has_gluon, is_invariant

GLUON_ROWS = 1024
"""From this number of rows on, a kernel with larger, and fewer, tiles is faster."""


@attention.kernel(device="cuda", name="triton", preference=10, supports=declines_floats)
def attention_triton(
    qkv_TW: Tensor, heads: HeadLayout, cos_TR: Tensor | None, sin_TR: Tensor | None, cache: LayerCache, rows: PagedRows
) -> Tensor:
    """See ``ops.attention``.

    Where results may not depend on other rows, one kernel computes all rows: a token must give the same result in a
    decode step and in a recomputed chunk after a preemption. Else drafts are computed row by row, by the kernel that
    divides long contexts among programs: their sequences' keys and values are then read from the second-level cache.
    """
    is_by_row = (rows.max_query_len == 1 or rows.single is not None) and not is_invariant()
    if is_by_row and rows.single is None and not heads.shares_cache and not is_packed(cache.keys):
        return decode_attention(qkv_TW, heads, cos_TR, sin_TR, cache, rows)
    slot_mapping_T, block_tables_SB = rows.of(cache)
    if is_packed(cache.keys):
        q_TNH = pack_store(qkv_TW, heads, cos_TR, sin_TR, cache, slot_mapping_T)
    else:
        q_TNH = rotate_store(qkv_TW, heads, cos_TR, sin_TR, cache.keys, cache.values, slot_mapping_T, cache.scales)
    out_TNH = torch.empty_like(q_TNH, dtype=qkv_TW.dtype)
    has_single = len(rows.seq_lens_S) > 1 and not is_invariant()
    if has_single or is_by_row:
        attend_single_rows(q_TNH, heads, cache, rows, out_TNH)
    if is_by_row:
        return out_TNH.view(len(q_TNH), -1)
    if len(q_TNH) >= GLUON_ROWS and has_gluon(q_TNH.device) and not is_invariant():
        from octavo_kernels.hopper.prefill_attention import hopper_prefill, suits

        if suits(q_TNH, heads, cache):
            hopper_prefill(
                (q_TNH,),
                (cache.keys,),
                cache.values,
                block_tables_SB,
                (rows.cu_seqlens_q[:-1], rows.cu_seqlens_q[1:]),
                rows.seq_lens_S,
                heads.scale,
                has_single,
                out_TNH,
            )
            return out_TNH.view(len(q_TNH), -1)
    prefill_attention(
        q_TNH,
        cache.keys,
        cache.values,
        block_tables_SB,
        rows.cu_seqlens_q,
        rows.seq_lens_S,
        heads.scale,
        heads.window,
        heads.softcap,
        heads.sinks_N,
        cache.scales,
        heads.slopes_N,
        skip_single=has_single,
        out=out_TNH,
    )
    return out_TNH.view(len(q_TNH), -1)
