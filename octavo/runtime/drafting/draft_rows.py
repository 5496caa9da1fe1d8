"""What drafters make of a step's rows: the rows of the positions behind it, and the draws.

Shapes: S sequences, M rows: N behind each sequence, P passes, B entries of a block table, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo import ops
from octavo.ops.attention import GroupRows, PagedRows
from octavo.ops.drafting import NewestTokens
from octavo.runtime.drafting.drafter import DraftInputs


def rows_behind(inputs: DraftInputs, num_passes: int, block_size: int) -> list[tuple[Tensor, PagedRows]]:
    """For each pass its positions, behind those of the newest tokens, and one row for each sequence there."""
    if not num_passes:
        return []
    of_passes = inputs.positions_T, inputs.last_rows_S, inputs.capacities_S, inputs.tables_GSB
    found = ops.draft_rows(*of_passes, num_passes, block_size)
    passes = []
    for i in range(num_passes):
        slots_GS = found.slots_GPS[:, i].unbind()
        groups = [
            GroupRows(slots_S, group.block_tables_SB)
            for slots_S, group in zip(slots_GS, inputs.rows.groups, strict=True)
        ]
        rows = PagedRows(tuple(groups), found.cu_seqlens_q, found.seq_lens_PS[i], 1)
        passes.append((found.positions_PS[i], rows))
    return passes


def block_rows(inputs: DraftInputs, positions_SN: Tensor, needed_R: Tensor, block_size: int) -> PagedRows:
    """N rows behind each sequence that all attend to each other: each is a sequence whose length reaches to the last.

    ``needed_R``: the rows whose output is needed.
    """
    N = positions_SN.shape[1]
    capacities_S = inputs.capacities_S
    groups = []
    for group in inputs.rows.groups:
        slots_NS = _slots(group.block_tables_SB, positions_SN.t(), capacities_S, block_size)
        groups.append(GroupRows(slots_NS.t().flatten(), group.block_tables_SB.repeat_interleave(N, dim=0)))
    lengths_S = torch.minimum(positions_SN[:, -1] + 1, capacities_S).int()
    # The bound of two rows forbids kernels that store the keys of a sequence's only row while others are attending.
    starts = _starts(capacities_S.repeat_interleave(N))
    return PagedRows(tuple(groups), starts, lengths_S.repeat_interleave(N), 2, needed_R)


def _slots(tables_SB: Tensor, positions_PS: Tensor, capacities_S: Tensor, block_size: int) -> Tensor:
    """The slots, int64 [P, S], of positions of each sequence in a KV group; -1 where it has no block."""
    indices_SP = (positions_PS // block_size).clamp(max=tables_SB.shape[1] - 1).t()
    slots_PS = tables_SB.gather(1, indices_SP).t() * block_size + positions_PS % block_size
    return slots_PS.masked_fill(positions_PS >= capacities_S, -1)


def _starts(capacities_M: Tensor) -> Tensor:
    """``PagedRows.cu_seqlens_q`` of sequences of one row; those at the end that are padding have no blocks and none."""
    has_row_M = (capacities_M > 0).int()
    return torch.cat((has_row_M.new_zeros(1), has_row_M.cumsum(0, dtype=torch.int32)))


class Draws:
    """The drafts of all sequences, drawn one after the other with the target's own noise: a draft is accepted as often
    as the two distributions agree."""

    def __init__(self, newest: NewestTokens, vocab_size: int) -> None:
        """``vocab_size``: that of the target."""
        K, S = newest.positions_KS.shape
        self.drafts_SK = torch.empty(S, K, dtype=torch.int32, device=newest.positions_KS.device)
        self._newest, self._vocab_size = newest, vocab_size
        self._num_drawn = 0

    def draw(self, logits_SV: Tensor, target_ids: Tensor | None = None) -> Tensor:
        """The next draft of each sequence, int64 [S]. ``target_ids``: the target's token of each column; ``None``: its
        first tokens."""
        i, newest = self._num_drawn, self._newest
        params_S = newest.params_S._replace(position=newest.positions_KS[i])
        self._num_drawn += 1
        tokens_S = ops.sample(logits_SV[:, : self._vocab_size], params_S, target_ids)
        return ops.keep_draft(tokens_S, self.drafts_SK, i, self._vocab_size)
