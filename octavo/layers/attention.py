"""The attention of a layer, over a cache of whole contexts or over the parts that several ranks have of them.

Ranks that would hold the same keys and values may divide the context of each sequence ("decode context parallel"):
each stores every P-th position. Queries of all their heads go to all of them, each attends to its own positions, and
every rank gets the results of its heads, which it merges.

Shapes: T tokens, N heads of this rank, P ranks, M = P N, H head dim, L latent, X = H + 1 or L + 1, R rotated pairs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo import ops
from octavo.ops.attention import HeadLayout, LayerCache, PagedRows
from octavo.ops.collective import ContextRanks
from octavo.ops.latent_attention import LatentHeads
from octavo.ops.linear import head_linear


def attention(
    qkv_TW: Tensor, heads: HeadLayout, cos_TR: Tensor | None, sin_TR: Tensor | None, cache: LayerCache, rows: PagedRows
) -> Tensor:
    """``ops.attention`` over a cache of any kind."""
    ranks = cache.context
    if ranks is None:
        return ops.attention(qkv_TW, heads, cos_TR, sin_TR, cache, rows)
    width = heads.sizes[0]
    queries = [part_TW[:, :width] for part_TW in ranks.gathered(qkv_TW)]
    all_TW = ops.concat(*queries, *([] if heads.shares_cache else [qkv_TW[:, width:]]))
    del queries  # of all ranks
    all_heads = heads._replace(num_heads=ranks.size * heads.num_heads, sinks_N=None)
    found_TMX = ops.partial_attention(all_TW, all_heads, cos_TR, sin_TR, cache, rows, ranks.part)
    return _merged(found_TMX, ranks, heads.sinks_N, qkv_TW.dtype).flatten(1)


def latent_attention(
    q_TW: Tensor, kv_TC: Tensor, heads: LatentHeads, cos_TR: Tensor, sin_TR: Tensor, cache: LayerCache, rows: PagedRows
) -> Tensor:
    """``ops.latent_attention`` over a cache of any kind."""
    ranks = cache.context
    if ranks is None:
        return ops.latent_attention(q_TW, kv_TC, heads, cos_TR, sin_TR, cache, rows)
    q_TNH = ops.store_latents(q_TW, kv_TC, heads, cos_TR, sin_TR, cache, rows)
    q_TMH = ranks.gathered(q_TNH).transpose(0, 1).flatten(1, 2)
    found_TMX = ops.partial_latent_attention(q_TMH, len(heads.norm_L), heads.scale, cache, rows, ranks.part)
    return head_linear(_merged(found_TMX, ranks, None, q_TW.dtype), heads.value_map_NVL)


def _merged(found_TMX: Tensor, ranks: ContextRanks, sinks_N: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The outputs of this rank's heads over whole contexts [T, N, H or L], given those of all heads over its part."""
    (T, M, X), P = found_TMX.shape, ranks.size
    parts_PTX = ranks.collective.exchange(found_TMX.view(T, P, M // P * X))
    return ops.merge_parts(parts_PTX.view(P, T, M // P, X), sinks_N, dtype)
