"""Attention to blocks of earlier positions that an indexer chose for each row (Qwen4's QSA).

An indexer caches one key for each position, in ``LayerCache.index_keys``, and makes one of the keys of every block of
``size`` positions, which takes the place of its last position's. A block's score for a row is the sum over the
indexer's heads of the positive parts of the dot products of their queries with the block's key. A row attends to the
blocks of the highest scores among those that end before it or with it, and to the positions behind the last of these.

Shapes: T tokens of the step, S sequences, N heads of the indexer, W width of its keys, K kv heads, G heads that share
one, H head dim, B blocks of the longest context, C blocks that a row attends to at most.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from octavo.ops.attention.attention import (
    MAX_SCRATCH,
    GroupRows,
    HeadLayout,
    LayerCache,
    PagedRows,
    attention,
    stored_heads,
)
from octavo.ops.attention.cached_rows import unpack_rows
from octavo.ops.attention.choose_keys import ChosenKeys
from octavo.ops.device_backend import is_gpu
from octavo.ops.dispatch import op

MOST_PAIRS = 2**13
"""Rows times kv heads that are computed as sequences at once: kernels have scratch memory for each."""


class RowPlaces(NamedTuple):
    """The sequences of a step's rows, and their positions in these; those of padding are valid ones of others."""

    seqs_T: Tensor
    """int64"""
    positions_T: Tensor
    """int64"""
    is_real_T: Tensor
    """Whether a row is no padding."""
    tables_SB: Tensor
    block_size: int

    @staticmethod
    def of(cache: LayerCache, rows: PagedRows, num_rows: int) -> RowPlaces:
        starts, (slots_T, tables_SB) = rows.cu_seqlens_q.long(), rows.of(cache)
        numbers_T = torch.arange(num_rows, device=starts.device)
        seqs_T = torch.searchsorted(starts, numbers_T, right=True).sub_(1).clamp_(max=len(rows.seq_lens_S) - 1)
        positions_T = rows.seq_lens_S.long()[seqs_T] - starts[seqs_T + 1] + numbers_T
        is_real_T = numbers_T < starts[-1]
        is_real_T = is_real_T & (slots_T >= 0)
        return RowPlaces(seqs_T, positions_T.where(is_real_T, 0), is_real_T, tables_SB, cache.keys.shape[2])

    def part(self, own: slice) -> RowPlaces:
        """Those of some rows."""
        rows = self.seqs_T[own], self.positions_T[own], self.is_real_T[own]
        return RowPlaces(*rows, self.tables_SB, self.block_size)

    def slots(self, positions_TX: Tensor) -> Tensor:
        """Where positions [T, X] of the rows' sequences are cached; those behind a row's own are its own."""
        known_TX = positions_TX.minimum(self.positions_T[:, None])
        blocks_TX = self.tables_SB[self.seqs_T[:, None], known_TX // self.block_size].long()
        return (blocks_TX * self.block_size + known_TX % self.block_size).where(self.is_real_T[:, None], 0)

    def units(self, blocks_TX: Tensor, size: int, unit: int) -> Tensor:
        """Where blocks of ``size`` positions [T, X] are cached, int64 [T, X size / unit], counted in units of so many
        positions, which divide both a block and one of the cache; for units behind a row's position any."""
        starts_TXE = blocks_TX.unsqueeze(2) * size + torch.arange(0, size, unit, device=blocks_TX.device)
        return self.slots(starts_TXE.flatten(1)) // unit


@op
def choose_blocks(
    q_TNW: Tensor, cache: LayerCache, rows: PagedRows, size: int, count: int, weights_TN: Tensor | None = None
) -> Tensor:
    """The numbers of the blocks that each row attends to, int64 [T, C] with C at most ``count``, in ascending order;
    behind them are numbers of no complete block. Of equal scores, those of the lowest numbers are chosen.

    ``weights``, float32, are what the positive parts are multiplied by before they are added.
    Sums are computed in float64, so that a choice does not depend on which rows are computed together.
    """
    index, tables_SB = cache.index_keys, rows.of(cache).block_tables_SB
    assert index is not None, "the layer has no indexer"
    (T, N, width), block_size = q_TNW.shape, index.shape[2]
    most = max(1, min(count, tables_SB.shape[1] * block_size // size))
    chosen_TC = torch.full((T, most), tables_SB.shape[1] * block_size, dtype=torch.int64, device=q_TNW.device)
    starts, lengths = rows.cu_seqlens_q.tolist(), rows.seq_lens_S.tolist()
    for s, length in enumerate(lengths):
        begin, end = starts[s], starts[s + 1]
        num_blocks = length // size
        if begin == end or not num_blocks:
            continue
        numbers_B = torch.arange(num_blocks, device=q_TNW.device)
        places_B = numbers_B * size + size - 1
        slots_B = tables_SB[s].long()[places_B // block_size] * block_size + places_B % block_size
        keys_BW = unpack_rows(index.flatten(0, 2)[slots_B], width).double()
        step = max(1, MAX_SCRATCH // (N * num_blocks))
        for first in range(begin, end, step):
            last = min(end, first + step)
            ends_Q1 = torch.arange(length - end + first + 1, length - end + last + 1, device=q_TNW.device)[:, None]
            parts_QNB = (q_TNW[first:last].double() @ keys_BW.mT).relu_()
            if weights_TN is not None:
                parts_QNB *= weights_TN[first:last, :, None]
            scores_QB = parts_QNB.sum(dim=1).float()
            is_open_QB = numbers_B >= ends_Q1 // size
            order_QB = scores_QB.masked_fill_(is_open_QB, float("-inf")).sort(dim=-1, descending=True, stable=True)
            best_QC = order_QB.indices[:, :most]
            best_QC = best_QC.masked_fill(is_open_QB.gather(1, best_QC), chosen_TC.shape[1] + num_blocks)
            chosen_TC[first:last, : best_QC.shape[1]] = best_QC.sort(dim=-1).values
    return chosen_TC


def attend_to_blocks(
    qkv_TW: Tensor,
    heads: HeadLayout,
    angles: tuple[Tensor, Tensor],
    cache: LayerCache,
    rows: PagedRows,
    chosen_TC: Tensor,
    size: int,
) -> Tensor:
    """``ops.attention`` of which each row sees the chosen blocks alone, and the positions behind all complete ones."""
    blocks_TC, lens_T1 = _with_open(chosen_TC, RowPlaces.of(cache, rows, len(qkv_TW)), size)
    return attend_in_order(qkv_TW, heads, angles, cache, rows, blocks_TC.unsqueeze(1), lens_T1, size)


def _with_open(chosen_TC: Tensor, places: RowPlaces, size: int) -> tuple[Tensor, Tensor]:
    """The chosen blocks of each row, then the one that its position is in, if that is not complete, [T, C + 1]; and how
    many positions of these the row sees [T, 1]."""
    complete_T1 = ((places.positions_T + 1) // size)[:, None]
    counts_T1 = (chosen_TC < complete_T1).sum(dim=1, keepdim=True)
    blocks_TC = torch.cat((chosen_TC, complete_T1), dim=1)
    numbers_C = torch.arange(blocks_TC.shape[1], device=chosen_TC.device)
    blocks_TC = blocks_TC.where(numbers_C < counts_T1, complete_T1)
    return blocks_TC, counts_T1 * size + ((places.positions_T + 1) % size)[:, None]


def chosen_keys(chosen_TC: Tensor, cache: LayerCache, rows: PagedRows, size: int, num_rows: int) -> ChosenKeys:
    """The positions of the chosen blocks, and those behind all complete ones."""
    places = RowPlaces.of(cache, rows, num_rows)
    blocks_TC, lens_T1 = _with_open(chosen_TC, places, size)
    unit = math.gcd(places.block_size, size)
    firsts_TE1 = (places.units(blocks_TC, size, unit) * unit).int().unsqueeze(2)
    slots_TEU = firsts_TE1 + torch.arange(unit, dtype=torch.int32, device=chosen_TC.device)
    starts = rows.cu_seqlens_q[-1].clamp(max=torch.arange(num_rows + 1, device=chosen_TC.device)).int()
    lens_T = lens_T1[:, 0].where(places.is_real_T, 0)
    return ChosenKeys(slots_TEU.flatten(1), lens_T.int(), starts)


def attend_in_order(
    qkv_TW: Tensor,
    heads: HeadLayout,
    angles: tuple[Tensor, Tensor],
    cache: LayerCache,
    rows: PagedRows,
    blocks_TKC: Tensor,
    lens_TK: Tensor,
    size: int,
) -> Tensor:
    """``ops.attention`` of which each kv head of a row sees so many positions, those of these blocks one after the
    other; with one axis of ``K`` in place of K heads, all of them do.

    Each row and each of its kv heads is computed as if it were a sequence of its own: in a view of the cache whose
    blocks hold one head, and so many positions that they divide both a chosen block and one of the cache.
    """
    assert not heads.window, "windows do not go with chosen blocks"
    T, K, S, H = len(qkv_TW), heads.num_kv_heads, cache.keys.shape[2], heads.head_dim
    q_TNH, slots_T = stored_heads(qkv_TW, heads, *angles, cache, rows), rows.of(cache).slot_mapping_T
    if is_gpu(qkv_TW):  # kernels of CPUs do not round queries: a row's bits are those of ``attention`` over all blocks
        q_TNH = q_TNH.to(qkv_TW.dtype)
    places, unit = RowPlaces.of(cache, rows, T), math.gcd(S, size)
    parts, of_heads_K1 = S // unit, torch.arange(K, device=qkv_TW.device)[:, None]
    lens_TK = lens_TK.expand(T, K).where(places.is_real_T[:, None], 0).int()
    layout = HeadLayout(heads.num_heads // K, 1, H, heads.scale, shares_cache=True)
    if cache.scales is not None:
        factors_K11, value_factors_K11 = (scale_K[:, None, None] for scale_K in cache.scales)
        q_TNH = (q_TNH.view(T, K, -1, H) * factors_K11).to(q_TNH.dtype)
    keys, values = (x.view(-1, 1, unit, x.shape[3]) for x in (cache.keys, cache.values))
    view = LayerCache(keys, values)
    found = q_TNH.new_empty(T * K, heads.num_heads // K * H)
    for first in range(0, T, max(1, MOST_PAIRS // K)):
        own = slice(first, min(T, first + max(1, MOST_PAIRS // K)))
        units_QE = places.part(own).units(blocks_TKC[own].flatten(1), size, unit)
        units_QKE = units_QE.view(len(units_QE), blocks_TKC.shape[1], -1)
        tables = (((units_QKE // parts) * K + of_heads_K1) * parts + units_QKE % parts).flatten(0, 1).int()
        numbers = torch.arange(len(tables) + 1, device=qkv_TW.device)
        alone = replace(
            rows,
            groups=(GroupRows(slots_T[own].repeat_interleave(K), tables),),
            cu_seqlens_q=((rows.cu_seqlens_q[-1] - first).clamp(min=0) * K).minimum(numbers).int(),
            seq_lens_S=lens_TK[own].flatten(),
            max_query_len=1,
            single=None,
            state_slots_S=None,
        )
        pairs = slice(K * own.start, K * own.stop)
        found[pairs] = attention(q_TNH[own].reshape(len(tables), -1), layout, None, None, view, alone)
    if cache.scales is not None:
        found = (found.view(T, K, -1, H) * value_factors_K11).to(found.dtype)
    return found.reshape(T, -1).to(qkv_TW.dtype)
