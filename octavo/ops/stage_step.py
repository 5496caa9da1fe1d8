"""Completes a step's inputs on the device, where the previous step's tokens are known.

Shapes: T rows, S sequences, B entries of the widest block table, C cells for last tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.ops.dispatch import op


@op
def stage_step(
    token_ids_T: Tensor,
    cu_seqlens_q: Tensor,
    cells_S: Tensor,
    last_tokens_C: Tensor,
    packed_tables: Tensor,
    width: Tensor,
    block_tables_SB: Tensor,
    first: int = 0,
) -> None:
    """Fill in tokens and block tables, in place.

    A sequence whose last row's token in ``token_ids`` (int64) is negative takes the token in its cell (int64 ``cells``,
    one per sequence; int32 ``last_tokens``), or 0 if that is negative. ``packed_tables`` (int32, flat) holds ``width``
    (int32 [1]) entries for each sequence, after those of ``first`` other sequences; they become the first entries of
    the sequence's row in ``block_tables``.
    """
    S, count = len(cells_S), int(width)
    has_rows_S = cu_seqlens_q[1:] > cu_seqlens_q[:-1]
    rows_S = (cu_seqlens_q[1:].long() - 1).clamp_(min=0)[has_rows_S]
    known = token_ids_T[rows_S]
    token_ids_T[rows_S] = torch.where(known < 0, last_tokens_C[cells_S[has_rows_S]].clamp(min=0), known)
    block_tables_SB[:S, :count] = packed_tables[first * count : (first + S) * count].view(S, count)
