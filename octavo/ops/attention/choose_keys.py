"""Which earlier positions each row attends to, chosen by an indexer (DeepSeek-V3.2's report, arXiv 2512.02556).

An indexer has a few heads of its own, and caches one key for each position. A position's score for a row is the sum
over the indexer's heads of a weight of the row times the positive part of the dot product with its query; the positions
of the highest scores are attended to, and of equal scores the lowest positions.

Shapes: T tokens of the step, S sequences, N heads of the indexer, W width of its keys, K positions that a row attends
to at most, C positions of a context, Q rows of one sequence that are computed together.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from octavo.ops.attention.attention import MAX_SCRATCH, GroupRows, LayerCache, PagedRows
from octavo.ops.attention.cached_rows import unpack_rows
from octavo.ops.dispatch import op

MOST_SCORES = 2**25
"""Scores that a kernel for GPUs holds at once, or those of one row."""
MOST_ROWS = 2**16 - 1
"""Rows that such a kernel takes at once: programs of a launch are no more along an axis that is not the first."""


class ChosenKeys(NamedTuple):
    """The positions of a step's rows that attention is computed over."""

    slots_TK: Tensor
    """int32: where they are cached, in the order of their positions; behind those of a row anything may follow."""
    counts_T: Tensor
    """int32: how many a row has; 0 for padding."""
    starts: Tensor
    """int32 [T + 1]: as if each row were a sequence; those of padding have no rows."""

    def of(self, cache: LayerCache, rows: PagedRows) -> tuple[LayerCache, PagedRows]:
        """A layer's cache and the step's rows, such that attention sees these positions: each row is the only one of a
        sequence, whose blocks have one position each."""
        keys, values = (x.view(-1, x.shape[1], 1, x.shape[3]) for x in (cache.keys, cache.values))
        group = GroupRows(rows.of(cache).slot_mapping_T, self.slots_TK)
        alone = replace(
            rows,
            groups=(group,),
            cu_seqlens_q=self.starts,
            seq_lens_S=self.counts_T,
            max_query_len=1,
            has_long_context=False,
            single=None,
            state_slots_S=None,
        )
        return cache._replace(keys=keys, values=values, group=0), alone


def longest_context(cache: LayerCache, rows: PagedRows) -> int:
    """What no context is longer than, as far as the host knows without waiting for a device."""
    most = rows.of(cache).block_tables_SB.shape[1] * cache.keys.shape[2]
    return min(most, rows.most_context or most)


def sees_all(cache: LayerCache, rows: PagedRows, count: int) -> bool:
    """Whether every row of the step attends to all positions up to its own: on a GPU, as far as the host knows."""
    if longest_context(cache, rows) <= count or not len(rows.seq_lens_S):
        return True
    return rows.seq_lens_S.device.type == "cpu" and int(rows.seq_lens_S.max()) <= count


@op
def choose_keys(q_TNW: Tensor, weights_TN: Tensor, cache: LayerCache, rows: PagedRows, count: int) -> ChosenKeys:
    """Choose up to ``count`` positions for each row, among those of its sequence up to its own.

    ``cache.index_keys`` holds the indexer's keys, those of this step included, of which one row is ``[1, W]`` like a
    cached head. Weights are float32. Scores are computed in float32 at least.
    """
    index, tables_SB = cache.index_keys, rows.of(cache).block_tables_SB
    assert index is not None, "the layer has no indexer"
    (T, N, W), block_size = q_TNW.shape, index.shape[2]
    wide = torch.promote_types(q_TNW.dtype, torch.float32)
    most = min(count, tables_SB.shape[1] * block_size)
    slots_TK = torch.zeros(T, most, dtype=torch.int32, device=q_TNW.device)
    counts_T = slots_TK.new_zeros(T)
    starts, lengths = rows.cu_seqlens_q.tolist(), rows.seq_lens_S.tolist()
    for s, length in enumerate(lengths):
        begin, end = starts[s], starts[s + 1]
        if begin == end:
            continue
        places_C = torch.arange(length, device=q_TNW.device)
        slots_C = tables_SB[s].long()[places_C // block_size] * block_size + places_C % block_size
        keys_CW = unpack_rows(index.flatten(0, 2)[slots_C], W).to(wide)
        for first in range(begin, end, max(1, MAX_SCRATCH // (N * length))):
            last = min(end, first + max(1, MAX_SCRATCH // (N * length)))
            positions_Q1 = torch.arange(length - end + first, length - end + last, device=q_TNW.device)[:, None]
            products = (q_TNW[first:last].to(wide) @ keys_CW.mT).relu_()
            scores_QC = (weights_TN[first:last, None].to(wide) @ products).squeeze(1)
            scores_QC.masked_fill_(places_C > positions_Q1, float("-inf"))
            best_QK = scores_QC.sort(dim=-1, descending=True, stable=True).indices[:, :most]
            own_QK = best_QK.masked_fill(best_QK > positions_Q1, length).sort(dim=-1).values.clamp_(max=length - 1)
            slots_TK[first:last, : own_QK.shape[1]] = slots_C[own_QK].int()
            counts_T[first:last] = positions_Q1[:, 0].int().add_(1).clamp_(max=most)
    return ChosenKeys(slots_TK, counts_T, torch.arange(T + 1, dtype=torch.int32).clamp_(max=starts[-1]).to(counts_T))
