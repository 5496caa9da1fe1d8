"""Attention in models in which the rows of an image attend to each other in both directions.

The rows of images are few and come in prompts alone, so they are computed apart, in plain torch, from what the kernel
has stored; the kernel's results for them, which see earlier rows only, are replaced. All other rows are the kernel's.

Shapes: T rows of the step, Q rows of one image, N heads, K kv heads, H head dim, W = (N + 2 K) H, C keys.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.layers.attention import attention
from octavo.layers.attention_inputs import Angles
from octavo.ops import apply_rope, rms_norm
from octavo.ops.attention.attention import MAX_SCRATCH, HeadLayout, LayerCache, PagedRows, Rule, Span, context


def attention_with_images(
    qkv_TW: Tensor, heads: HeadLayout, angles: Angles, cache: LayerCache, rows: PagedRows
) -> Tensor:
    """``ops.attention``, in which rows of a span also see the later ones of it."""
    cos_TR, sin_TR = angles
    attended_TX = attention(qkv_TW, heads, cos_TR, sin_TR, cache, rows)
    for span in rows.images.spans if rows.images is not None else ():
        assert cos_TR is not None
        assert sin_TR is not None
        own = slice(span.first_row, span.first_row + span.num_rows)
        attended_TX[own] = _attend(qkv_TW[own], heads, (cos_TR[own], sin_TR[own]), cache, rows, span)
    return attended_TX


def _attend(
    qkv_QW: Tensor, heads: HeadLayout, angles: tuple[Tensor, Tensor], cache: LayerCache, rows: PagedRows, span: Span
) -> Tensor:
    """The rows of one image that are in this step, which are its last: [Q, N * H]."""
    N, H = heads.num_heads, heads.head_dim
    q_QNH = qkv_QW[:, : N * H].reshape(-1, N, H)
    if heads.q_norm_H is not None:
        q_QNH = rms_norm(q_QNH.reshape(-1, H), heads.q_norm_H, heads.norm_eps).view(q_QNH.shape)
    q_QNH, _ = apply_rope(q_QNH, q_QNH, *angles)
    first = span.end - span.num_rows
    begin = max(0, min(span.start, first - heads.window + 1)) if heads.window else 0
    table_B = rows.of(cache).block_tables_SB[span.seq].long()
    keys, values = context(cache.keys, cache.values, table_B, begin, span.end, H)
    sinks = None if heads.sinks_N is None else heads.sinks_N[:, None]
    rule = Rule(heads.scale, heads.window, heads.softcap, sinks, cache.scales)
    dtype = torch.promote_types(q_QNH.dtype, torch.float32)
    k_KCH, v_KCH = rule.scaled(keys.to(dtype), values.to(dtype))
    K, C, _ = k_KCH.shape
    position_C = torch.arange(begin, span.end, device=q_QNH.device)
    position_Q = torch.arange(first, span.end, device=q_QNH.device)
    out_QNH = torch.empty_like(q_QNH)
    step = max(1, MAX_SCRATCH // (N * C))
    for part in torch.split(torch.arange(len(q_QNH), device=q_QNH.device), step):
        q_KGQH = q_QNH[part].to(dtype).view(-1, K, N // K, H).permute(1, 2, 0, 3)
        products = (q_KGQH.reshape(K, -1, H) @ k_KCH.mT).view(N, -1, C)
        is_hidden_QC = torch.zeros(len(part), C, dtype=torch.bool, device=q_QNH.device)
        if heads.window:
            is_before = position_C < span.start
            is_hidden_QC = (position_C <= position_Q[part, None] - heads.window) & is_before
        weights = rule.weights(products, is_hidden_QC)
        out = (weights.view(K, -1, C) @ v_KCH).view(K, -1, len(part), H).permute(2, 0, 1, 3)
        out_QNH[part] = out.reshape(len(part), N, H).to(q_QNH.dtype)
    return out_QNH.flatten(1)
