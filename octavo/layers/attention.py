"""The attention of a layer, over a cache of whole contexts or over the parts that several ranks have of them.

Ranks that would hold the same keys and values may divide the context of each sequence ("decode context parallel"):
each stores every P-th position. Queries of all their heads go to all of them, each attends to its own positions, and
every rank gets the results of its heads, which it merges.

Shapes: T tokens of the step, N heads of this rank, P ranks, M = P N, H head dim, X = H + 1, R rotated pairs.
"""

from __future__ import annotations

from torch import Tensor

from octavo import ops
from octavo.ops.attention import HeadLayout, LayerCache, PagedRows
from octavo.ops.collective import ContextRanks
from octavo.ops.latent_attention import LatentHeads, store_latents
from octavo.ops.linear import head_linear


def attention(
    qkv_TW: Tensor, heads: HeadLayout, cos_TR: Tensor | None, sin_TR: Tensor | None, cache: LayerCache, rows: PagedRows
) -> Tensor:
    """``ops.attention`` over a cache of any kind."""
    if cache.context is None:
        return ops.attention(qkv_TW, heads, cos_TR, sin_TR, cache, rows)
    q_TW, own_TW = qkv_TW.split_with_sizes([heads.sizes[0], sum(heads.sizes[1:])], dim=-1)
    out_TNH = _over_ranks((q_TW, own_TW), heads, (cos_TR, sin_TR), cache, rows, cache.context)
    return out_TNH.flatten(1).to(qkv_TW.dtype)


def latent_attention(
    q_TW: Tensor, kv_TC: Tensor, heads: LatentHeads, cos_TR: Tensor, sin_TR: Tensor, cache: LayerCache, rows: PagedRows
) -> Tensor:
    """``ops.latent_attention`` over a cache of any kind."""
    if cache.context is None:
        return ops.latent_attention(q_TW, kv_TC, heads, cos_TR, sin_TR, cache, rows)
    q_TNH = store_latents(q_TW, kv_TC, heads, cos_TR, sin_TR, cache, rows)
    layout = HeadLayout(q_TNH.shape[1], 1, q_TNH.shape[2], heads.scale, shares_cache=True)
    out_TNH = _over_ranks((q_TNH.flatten(1), None), layout, (None, None), cache, rows, cache.context)
    return head_linear(out_TNH[..., 2 * cos_TR.shape[1] :].to(q_TW.dtype), heads.value_map_NVL)


def _over_ranks(
    qkv: tuple[Tensor, Tensor | None],
    heads: HeadLayout,
    angles: tuple[Tensor | None, Tensor | None],
    cache: LayerCache,
    rows: PagedRows,
    ranks: ContextRanks,
) -> Tensor:
    """The outputs of this rank's heads over whole contexts [T, N, H], float32 at least, given its queries [T, N * H]
    and, where they are not stored yet, keys and values side by side."""
    (q_TW, own_TW), (cos_TR, sin_TR) = qkv, angles
    T, (N, H, P) = len(q_TW), (heads.num_heads, heads.head_dim, ranks.size)
    first_TW, *others = [*ranks.gathered(q_TW).unbind(), *([] if own_TW is None else [own_TW])]
    qkv_TW, all_heads = ops.concat(first_TW, *others), heads._replace(num_heads=P * N, sinks_N=None)
    found_TMX = ops.partial_attention(qkv_TW, all_heads, cos_TR, sin_TR, cache, rows, ranks.part)
    parts_PTX = ranks.exchanged(found_TMX.view(T, P, -1))
    return ops.merge_parts(parts_PTX.view(P, T, N, H + 1), heads.sinks_N)
