"""Multi-head latent attention: one key for all heads, its unrotated part is the value (DeepSeek-V2, arXiv 2405.04434).

Shapes: T tokens of the step, N heads, P plain part of a projected query, R rotated pairs, L latent, V values of a head,
W = N (P + 2 R), C = L + 2 R, H = 2 R + L.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from octavo.ops.attention.attention import LayerCache, PagedRows, apply_rope, paged_attention, store_kv
from octavo.ops.attention.choose_keys import ChosenKeys
from octavo.ops.dispatch import op
from octavo.ops.linear.linear import head_linear
from octavo.ops.norms import rms_norm

EXPANDED_WIDTHS = (128, 64, 128)
"""P, 2 R and V of the heads whose keys and values a kernel may expand from the latents for prompts: DeepSeek's."""
LARGEST_EXPANDED = 17 << 26
"""Bytes that it expands at once, at most: 137,000 positions of 16 heads of 16-bit numbers."""


class LatentHeads(NamedTuple):
    """Static parameters of a layer's latent attention."""

    key_map_NLP: Tensor
    """Maps the plain part of each head's query to the latent space; its transpose makes keys of latents."""
    value_map_NVL: Tensor
    """Maps latents to the values of each head."""
    norm_L: Tensor
    """RMSNorm weight of the latent."""
    norm_eps: float
    scale: float
    sinks_N: Tensor | None = None
    """float32: an additional logit per head in the denominator of the softmax."""
    window: int = 0
    """Sliding window in positions, including the row's own; 0: full attention."""


@op
def latent_attention(
    q_TW: Tensor,
    kv_TC: Tensor,
    heads: LatentHeads,
    cos_TR: Tensor,
    sin_TR: Tensor,
    cache: LayerCache,
    rows: PagedRows,
    chosen: ChosenKeys | None = None,
) -> Tensor:
    """Map and rotate queries, norm and rotate the key, store it, attend; the weighted values, a new tensor [T, N, V].

    A row of ``q`` holds N queries, each with P plain, then 2 R rotated numbers; a row of ``kv`` the latent, then 2 R
    numbers of the key that are rotated. An entry of the cache is the key: its rotated part, then the normed latent. The
    cache has one kv head, and one tensor for keys and values. The results of padding rows are unspecified, and nothing
    is stored for them. With ``chosen``, a row attends to these positions alone; such a layer has no window.
    """
    q_TNH = store_latents(q_TW, kv_TC, heads, cos_TR, sin_TR, cache, rows)
    if chosen is not None:
        cache, rows = chosen.of(cache, rows)
    tables_SB = rows.of(cache).block_tables_SB
    out_TNH: Tensor = paged_attention(
        q_TNH,
        cache.keys,
        cache.values,
        tables_SB,
        rows.cu_seqlens_q,
        rows.seq_lens_S,
        heads.scale,
        heads.window,
        sinks_N=heads.sinks_N,
    )
    return head_linear(out_TNH[..., 2 * cos_TR.shape[1] :], heads.value_map_NVL)


def expanded_positions(num_heads: int, longest: int, itemsize: int) -> int:
    """Positions for whose expanded keys and values there is room, where contexts have up to ``longest``."""
    return min(longest, LARGEST_EXPANDED // expanded_bytes(num_heads, 1, itemsize))


def expanded_bytes(num_heads: int, positions: int, itemsize: int) -> int:
    """Bytes of the keys and values of so many positions; the rotated part of the key is one for all heads."""
    plain, rotated, value = EXPANDED_WIDTHS
    return positions * (num_heads * (plain + value) + rotated) * itemsize


@op
def store_latents(
    q_TW: Tensor, kv_TC: Tensor, heads: LatentHeads, cos_TR: Tensor, sin_TR: Tensor, cache: LayerCache, rows: PagedRows
) -> Tensor:
    """Store what ``latent_attention`` stores; returns the queries that it attends with, a new tensor [T, N, H]."""
    (N, L, P), (T, R) = heads.key_map_NLP.shape, cos_TR.shape
    plain_TNP, q_rotated = q_TW.view(T, N, P + 2 * R).split_with_sizes([P, 2 * R], dim=-1)
    latent_TL, k_rotated = kv_TC.split_with_sizes([L, 2 * R], dim=-1)
    q_rotated, k_rotated = apply_rope(q_rotated, k_rotated[:, None], cos_TR, sin_TR)
    latent_TL = rms_norm(latent_TL, heads.norm_L, heads.norm_eps)
    k_T1H = torch.cat((k_rotated, latent_TL[:, None]), dim=-1)
    store_kv(k_T1H, k_T1H, cache.keys, cache.values, rows.of(cache).slot_mapping_T)
    return torch.cat((q_rotated, head_linear(plain_TNP, heads.key_map_NLP)), dim=-1)
