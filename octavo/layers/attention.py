"""The attention of a layer, over a cache of whole contexts or over the parts that several ranks have of them; and the
rows of a step of which a rank computes it.

Ranks that would hold the same keys and values may divide the context of each sequence ("decode context parallel"):
each stores every P-th position. Queries of all their heads go to all of them, each attends to its own positions, and
every rank gets the results of its heads, which it merges.

Or they divide the sequences ("data-parallel attention"): a sequence belongs to the rank that has its blocks, which has
all heads. All ranks have the residual stream of all rows, as feed-forward layers are divided by their widths or
experts: what a rank's attention adds for its rows is summed over the ranks, with zeros in place of others' rows, which
change no bit of it. On CPUs a rank picks its rows; on GPUs, where the host does not know which those are and a graph
has its shapes, it computes all, and others' as if their contexts began with this step.

Shapes: T rows of the step, n of them of this rank, R rotated pairs, or rows whose logits are needed, of which this rank
has r, S sequences, N heads of this rank, P ranks, M = P N, H head dim, L latent, X = H + 1 or L + 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from octavo import ops
from octavo.ops.attention.attention import GroupRows, HeadLayout, ImageRows, LayerCache, PagedRows, SingleRows
from octavo.ops.attention.choose_keys import ChosenKeys
from octavo.ops.attention.latent_attention import LatentHeads
from octavo.ops.collective import Collective, ContextRanks
from octavo.ops.linear.linear import head_linear


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
    q_TW: Tensor,
    kv_TC: Tensor,
    heads: LatentHeads,
    cos_TR: Tensor,
    sin_TR: Tensor,
    cache: LayerCache,
    rows: PagedRows,
    chosen: ChosenKeys | None = None,
) -> Tensor:
    """``ops.latent_attention`` over a cache of any kind."""
    ranks = cache.context
    if ranks is None:
        return ops.latent_attention(q_TW, kv_TC, heads, cos_TR, sin_TR, cache, rows, chosen)
    assert chosen is None, "the cache has a part of each context"
    q_TNH = ops.store_latents(q_TW, kv_TC, heads, cos_TR, sin_TR, cache, rows)
    q_TMH = ranks.gathered(q_TNH).transpose(0, 1).flatten(1, 2)
    found_TMX = ops.partial_latent_attention(q_TMH, len(heads.norm_L), heads.scale, cache, rows, ranks.part)
    return head_linear(_merged(found_TMX, ranks, heads.sinks_N, q_TW.dtype), heads.value_map_NVL)


def _merged(found_TMX: Tensor, ranks: ContextRanks, sinks_N: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The outputs of this rank's heads over whole contexts [T, N, H or L], given those of all heads over its part."""
    (T, M, X), P = found_TMX.shape, ranks.size
    parts_PTX = ranks.collective.exchange(found_TMX.view(T, P, M // P * X))
    return ops.merge_parts(parts_PTX.view(P, T, M // P, X), sinks_N, dtype)


Mix = Callable[[Tensor, PagedRows], Tensor]
"""What attention makes of the residual stream [n, D] of some rows of a step, given their metadata: [n, N H]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRows(PagedRows):
    """The metadata of a step's rows, with that of this rank's own ones. Slots and blocks count through all ranks."""

    own: PagedRows
    """That of this rank's rows, with slots and blocks in its own cache; without logits indices."""
    own_n: Tensor
    """int64: which rows these are."""
    before_T: Tensor
    """int64 [T + 1]: how many of them are before each row."""
    collective: Collective

    def part(self, x_TD: Tensor, mix: Mix, project: Callable[[Tensor], Tensor]) -> Tensor:
        """What this rank's attention adds to the rows whose logits are needed, zeros where they are others', [R, D]."""
        part_RD = torch.zeros_like(self.pick(x_TD, x_TD)[1])
        if len(self.own_n):
            mixed_nN, (chosen_r, places_r) = mix(x_TD[self.own_n], self.own), self.places
            part_RD[places_r] = project(mixed_nN[chosen_r])
        return part_RD

    @property
    def places(self) -> tuple[Tensor, Tensor]:
        """Of this rank's rows those whose logits are needed [r], and their places among all such rows [r]."""
        if self.logits_indices_R is None:
            return torch.arange(len(self.own_n), device=self.own_n.device), self.own_n
        indices_R = self.logits_indices_R
        first_R = self.before_T[indices_R]
        places_r = (self.before_T[indices_R + 1] > first_R).nonzero()[:, 0]
        return first_R[places_r], places_r


def rank_rows(rows: PagedRows, collective: Collective, num_blocks: Sequence[int], block_size: int) -> RankRows:
    """``rows`` for the rank of ``collective``, where each rank has ``num_blocks`` of each KV group."""
    rank, (first, *_) = collective.rank, rows.groups
    is_own_T = first.slot_mapping_T.div(num_blocks[0] * block_size, rounding_mode="floor") == rank
    own_n = is_own_T.nonzero()[:, 0]
    before_T = torch.cat((own_n.new_zeros(1), is_own_T.cumsum(0)))
    bounds = before_T[rows.cu_seqlens_q]
    own_S = bounds.diff().nonzero()[:, 0]
    groups = []
    for group, count in zip(rows.groups, num_blocks, strict=True):
        slots_n = group.slot_mapping_T[own_n] - rank * count * block_size
        tables_SB = (group.block_tables_SB[own_S] - rank * count).clamp_(min=0)  # behind a window entries are 0
        groups.append(GroupRows(slots_n, tables_SB))
    single, images = rows.single, rows.images
    if single is not None:
        seqs_n = torch.searchsorted(own_S, single.seqs_T[own_n].long())
        single = SingleRows(seqs_n.to(single.seqs_T.dtype), single.positions_T[own_n])
    if images is not None:
        seqs, firsts = own_S.tolist(), before_T.tolist()
        spans = [span for span in images.spans if span.seq in seqs]
        spans = [span._replace(first_row=firsts[span.first_row], seq=seqs.index(span.seq)) for span in spans]
        images = ImageRows(images.slots_T[own_n], images.pool, tuple(spans))
    own = PagedRows(
        tuple(groups),
        torch.cat((bounds.new_zeros(1), bounds[own_S + 1])).to(rows.cu_seqlens_q.dtype),
        rows.seq_lens_S[own_S],
        rows.max_query_len,
        single=single,
        has_long_context=rows.has_long_context,
        most_context=rows.most_context,
        rope_shifts_AT=None if rows.rope_shifts_AT is None else rows.rope_shifts_AT[:, own_n],
        images=images,
    )
    every = {name: getattr(rows, name) for name in PagedRows.__dataclass_fields__}
    return RankRows(**every, own=own, own_n=own_n, before_T=before_T, collective=collective)


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskedRankRows(PagedRows):
    """``RankRows`` whose shapes do not depend on which rows are whose."""

    own: PagedRows
    """That of all rows, with slots and blocks in this rank's cache. Nothing is stored for others' rows; they attend to
    as many positions as the step has rows of their sequence, of any contents."""
    is_own_T: Tensor
    collective: Collective

    def part(self, x_TD: Tensor, mix: Mix, project: Callable[[Tensor], Tensor]) -> Tensor:
        """See ``RankRows``."""
        mixed_RN, is_own_R = self.pick(mix(x_TD, self.own), self.is_own_T)
        return project(mixed_RN).masked_fill_(~is_own_R[:, None], 0)


def masked_rank_rows(
    rows: PagedRows, collective: Collective, num_blocks: Sequence[int], block_size: int
) -> MaskedRankRows:
    """``rank_rows`` without a wait for the device."""
    rank, (first, *_), counts_S = collective.rank, rows.groups, rows.cu_seqlens_q.diff()
    is_own_T = first.slot_mapping_T.div(num_blocks[0] * block_size, rounding_mode="floor") == rank
    is_own_S = is_own_T[rows.cu_seqlens_q[:-1].long().clamp(max=len(is_own_T) - 1)]
    groups = []
    for group, count in zip(rows.groups, num_blocks, strict=True):
        slots_T = torch.where(is_own_T, group.slot_mapping_T - rank * count * block_size, -1)
        groups.append(GroupRows(slots_T, (group.block_tables_SB - rank * count).clamp_(0, count - 1)))
    single = rows.single
    if single is not None:
        single = single._replace(positions_T=torch.where(is_own_T, single.positions_T, 0))
    lens_S = torch.where(is_own_S, rows.seq_lens_S, torch.minimum(rows.seq_lens_S, counts_S))
    own = replace(rows, groups=tuple(groups), seq_lens_S=lens_S, single=single)
    every = {name: getattr(rows, name) for name in PagedRows.__dataclass_fields__}
    return MaskedRankRows(**every, own=own, is_own_T=is_own_T, collective=collective)
