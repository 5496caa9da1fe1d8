"""Multi-head latent attention: one key for all heads, its unrotated part is the value (DeepSeek-V2, arXiv 2405.04434).

Shapes: T tokens of the step, N heads, R rotated pairs, L latent, H = 2 R + L, W = (N + 1) H.
"""

from __future__ import annotations

from torch import Tensor

from octavo.ops.apply_rope import apply_rope
from octavo.ops.attention import LayerCache, PagedRows
from octavo.ops.dispatch import op
from octavo.ops.paged_attention import paged_attention
from octavo.ops.store_kv import store_kv


@op
def latent_attention(
    qk_TW: Tensor, num_heads: int, cos_TR: Tensor, sin_TR: Tensor, cache: LayerCache, rows: PagedRows, scale: float
) -> Tensor:
    """Rotate queries and the key, store the key, attend; the weighted latents, a new tensor [T, N, L] of qk's dtype.

    A row of ``qk`` holds N queries, then the key, each with 2 R rotated, then L unrotated numbers. The cache has one kv
    head, and one tensor for keys and values. The results of padding rows are unspecified, and nothing is stored for
    them.
    """
    T, R = cos_TR.shape
    qk_TMH = qk_TW.view(T, num_heads + 1, -1)
    q_TNH, k_T1H = apply_rope(qk_TMH[:, :num_heads], qk_TMH[:, num_heads:], cos_TR, sin_TR)
    slot_mapping_T, block_tables_SB = rows.of(cache)
    store_kv(k_T1H, k_T1H, cache.keys, cache.values, slot_mapping_T)
    tables = (block_tables_SB, rows.cu_seqlens_q, rows.seq_lens_S)
    out_TNH: Tensor = paged_attention(q_TNH.contiguous(), cache.keys, cache.values, *tables, scale)
    return out_TNH[..., 2 * R :]


def join_heads(q_rotated: Tensor, q_latent: Tensor, k_rotated: Tensor, k_latent: Tensor) -> Tensor:
    """A row of ``qk`` for each token: queries [T, N, 2 R] and [T, N, L], the key [T, 2 R] and [T, L]."""
    T, N, L = q_latent.shape
    split = q_rotated.shape[-1]
    qk_TMH = q_latent.new_empty(T, N + 1, split + L)
    qk_TMH[:, :N, :split], qk_TMH[:, :N, split:] = q_rotated, q_latent
    qk_TMH[:, N, :split], qk_TMH[:, N, split:] = k_rotated, k_latent
    return qk_TMH.view(T, -1)
