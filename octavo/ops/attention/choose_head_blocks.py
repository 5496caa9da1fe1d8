"""Which blocks of earlier positions each row attends to, chosen by an indexer, for each kv head (MiniMax M3).

An indexer has a query for each kv head, and caches one key for each position. A block is worth the largest dot product
with the keys of its positions up to the row's own; the blocks that are worth most are attended to, of equal ones those
that come first, and always the row's own block and some before it.

Shapes: T tokens of the step, S sequences, K kv heads, I width of the indexer's keys, C blocks of a context, B blocks
chosen, G query heads that share a kv head.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from octavo.ops.attention.attention import MAX_SCRATCH, HeadLayout, LayerCache, PagedRows
from octavo.ops.attention.cached_rows import unpack_rows
from octavo.ops.attention.choose_blocks import RowPlaces, attend_in_order
from octavo.ops.dispatch import op
from octavo.ops.linear.linear import linear


class HeadBlocks(NamedTuple):
    """How blocks are chosen."""

    size: int
    """Positions of a block."""
    most: int
    """Blocks that a row attends to, at most."""
    local: int
    """How many of them are the row's own block and those before it, if it is that far."""


@op
def choose_head_blocks(q_TKI: Tensor, cache: LayerCache, rows: PagedRows, rule: HeadBlocks) -> Tensor:
    """The blocks of each row's sequence that it attends to, int32 [T, K, B]: ascending, behind them -1. B is the rule's
    most, or what the block tables have room for.

    ``cache.index_keys`` holds the indexer's keys, those of this step included, each like a cached head. Dot products
    are computed in float32 at least.
    """
    index, tables_SB = cache.index_keys, rows.of(cache).block_tables_SB
    assert index is not None, "the layer has no indexer"
    (T, K, width), block_size = q_TKI.shape, index.shape[2]
    wide, room = torch.promote_types(q_TKI.dtype, torch.float32), -(-tables_SB.shape[1] * block_size // rule.size)
    ids_TKB = torch.full((T, K, min(rule.most, room)), -1, dtype=torch.int32, device=q_TKI.device)
    starts, lengths = rows.cu_seqlens_q.tolist(), rows.seq_lens_S.tolist()
    for s, length in enumerate(lengths):
        begin, end = starts[s], starts[s + 1]
        if begin == end:
            continue
        places = torch.arange(-(-length // rule.size) * rule.size, device=q_TKI.device)
        read = places.clamp(max=length - 1)
        slots = tables_SB[s].long()[read // block_size] * block_size + read % block_size
        keys_PI = unpack_rows(index.flatten(0, 2)[slots], width).to(wide)
        step = max(1, MAX_SCRATCH // (K * len(places)))
        for first in range(begin, end, step):
            last = min(end, first + step)
            positions_Q = torch.arange(length - end + first, length - end + last, device=q_TKI.device)
            products_QKP = linear(q_TKI[first:last].flatten(0, 1).to(wide), keys_PI).float().view(last - first, K, -1)
            products_QKP.masked_fill_((places > positions_Q[:, None])[:, None], float("-inf"))
            worth_QKC = products_QKP.view(last - first, K, -1, rule.size).amax(dim=-1)
            chosen = best_blocks(worth_QKC, positions_Q, rule)
            ids_TKB[first:last, :, : chosen.shape[2]] = chosen
    return ids_TKB


def best_blocks(worth_QKC: Tensor, positions_Q: Tensor, rule: HeadBlocks) -> Tensor:
    """The blocks of rows at these positions, given what blocks are worth, which is overwritten: float32 [Q, K, C]."""
    blocks_C = torch.arange(worth_QKC.shape[2], device=worth_QKC.device)
    own_Q1 = positions_Q[:, None] // rule.size
    is_later = (blocks_C > own_Q1)[:, None]
    is_local = ((blocks_C <= own_Q1) & (blocks_C > own_Q1 - rule.local))[:, None]
    worth_QKC.masked_fill_(worth_QKC.isnan(), torch.finfo(torch.float32).min).add_(0.0)  # none is -0.0
    worth_QKC.masked_fill_(is_local, float("inf")).masked_fill_(is_later, float("-inf"))
    bits = worth_QKC.view(torch.int32)
    none = len(blocks_C)
    unequal = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long()  # integers in the order of floats
    unequal.bitwise_left_shift_(32).bitwise_or_(none - blocks_C)
    best = unequal.topk(min(rule.most, none), dim=-1).indices
    ids = best.masked_fill(best > own_Q1[:, None], none).sort(dim=-1).values
    return ids.masked_fill_(ids == none, -1).int()


def attend_to_head_blocks(
    qkv_TW: Tensor,
    heads: HeadLayout,
    angles: tuple[Tensor, Tensor],
    cache: LayerCache,
    rows: PagedRows,
    ids_TKB: Tensor,
    size: int,
) -> Tensor:
    """``ops.attention`` of which each kv head of a row sees the blocks that are chosen for it alone."""
    positions_T1 = RowPlaces.of(cache, rows, len(qkv_TW)).positions_T[:, None]
    sees_own_TK = (ids_TKB == (positions_T1 // size).unsqueeze(2)).any(dim=-1)
    lens_TK = (ids_TKB >= 0).sum(dim=-1) * size - (size - 1 - positions_T1 % size) * sees_own_TK
    return attend_in_order(qkv_TW, heads, angles, cache, rows, ids_TKB.clamp(min=0).long(), lens_TK, size)
