"""The rows in which a drafter computes one draft after the other, behind the newest token of each sequence.

Shapes: T rows of the step, S sequences, P passes, G KV groups, B entries of the widest block table.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from octavo.ops.dispatch import op


class DraftRows(NamedTuple):
    """One row for each sequence and pass."""

    positions_PS: Tensor
    """int64"""
    slots_GPS: Tensor
    """int64; -1 where the sequence has no block."""
    seq_lens_PS: Tensor
    """int32: the positions that are attended, at most those with a block."""
    cu_seqlens_q: Tensor
    """int32 [S + 1], the same for all passes; sequences of padding, which are the last and have no blocks, have no
    row."""


@op
def draft_rows(
    positions_T: Tensor,
    last_rows_S: Tensor,
    capacities_S: Tensor,
    block_tables_GSB: Tensor,
    num_passes: int,
    block_size: int,
) -> DraftRows:
    """The rows behind ``positions_T[last_rows_S]`` (both int64), at the next position in each pass.

    ``capacities`` (int32): positions of each sequence that have a block in every group; block tables are int32.
    """
    ahead_P = torch.arange(1, num_passes + 1, device=positions_T.device)
    positions_PS = positions_T[last_rows_S] + ahead_P.unsqueeze(1)
    blocks_PS = (positions_PS // block_size).clamp(max=block_tables_GSB.shape[2] - 1)
    indices_GSP = blocks_PS.t().expand(len(block_tables_GSB), -1, -1)
    slots_GPS = block_tables_GSB.gather(2, indices_GSP).transpose(1, 2) * block_size + positions_PS % block_size
    slots_GPS = slots_GPS.masked_fill(positions_PS >= capacities_S, -1)
    has_row_S = (capacities_S > 0).int()
    starts = torch.cat((has_row_S.new_zeros(1), has_row_S.cumsum(0, dtype=torch.int32)))
    return DraftRows(positions_PS, slots_GPS, torch.minimum(positions_PS + 1, capacities_S).int(), starts)
