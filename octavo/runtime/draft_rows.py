"""What drafters make of a step's rows: the rows of the positions behind it, and the draws.

Shapes: S sequences, M rows: N behind each sequence, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo import ops
from octavo.ops.attention import GroupRows, PagedRows
from octavo.ops.sample import SampleParams
from octavo.runtime.drafter import DraftInputs, slots_of


def next_rows(inputs: DraftInputs, positions_S: Tensor, block_size: int) -> PagedRows:
    """One row for each sequence, at these positions (int64)."""
    capacities_S = inputs.capacities_S
    groups = [
        GroupRows(slots_of(group, positions_S, capacities_S, block_size), group.block_tables_SB)
        for group in inputs.rows.groups
    ]
    lengths_S = torch.minimum(positions_S + 1, capacities_S.long()).int()
    return PagedRows(tuple(groups), _starts(capacities_S), lengths_S, 1)


def block_rows(inputs: DraftInputs, positions_SN: Tensor, needed_R: Tensor, block_size: int) -> PagedRows:
    """N rows behind each sequence that all attend to each other: each is a sequence whose length reaches to the last.

    ``needed_R``: the rows whose output is needed.
    """
    N = positions_SN.shape[1]
    capacities_M = inputs.capacities_S.repeat_interleave(N)
    groups = []
    for group in inputs.rows.groups:
        tables_MB = group.block_tables_SB.repeat_interleave(N, dim=0)
        wide = GroupRows(group.slot_mapping_T, tables_MB)
        groups.append(GroupRows(slots_of(wide, positions_SN.flatten(), capacities_M, block_size), tables_MB))
    lengths_S = torch.minimum(positions_SN[:, -1] + 1, inputs.capacities_S.long()).int()
    # The bound of two rows forbids kernels that store the keys of a sequence's only row while others are attending.
    return PagedRows(tuple(groups), _starts(capacities_M), lengths_S.repeat_interleave(N), 2, needed_R)


def _starts(capacities_M: Tensor) -> Tensor:
    """``PagedRows.cu_seqlens_q`` of sequences of one row; those at the end that are padding have no blocks and none."""
    has_row_M = (capacities_M > 0).int()
    return torch.cat((has_row_M.new_zeros(1), has_row_M.cumsum(0, dtype=torch.int32)))


def drawn(logits_SV: Tensor, params_S: SampleParams, ahead: int | Tensor) -> Tensor:
    """Tokens, int64 [S], at ``ahead`` positions behind those of ``params``, with the target's own noise: a draft is
    accepted as often as the two distributions agree. While kernels are compiled, results are any tokens."""
    moved = params_S._replace(position=params_S.position + ahead)
    return ops.sample(logits_SV, moved).long().clamp(0, logits_SV.shape[1] - 1)
