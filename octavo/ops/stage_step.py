"""Last touches to a step's inputs, made where the tokens of the step before are known: on the device.

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

    A sequence whose last row's token is negative (of ``token_ids``, int64) goes on with the token in its cell (int64
    ``cells``, one for each sequence; int32 ``last_tokens``), or with 0 where that is negative. ``packed_tables``
    (int32, flat) holds ``width`` (int32 [1]) entries for each sequence one after the other, after as many for ``first``
    others; they become the first entries of its row in ``block_tables``.
    """
    S, count = len(cells_S), int(width)
    has_rows_S = cu_seqlens_q[1:] > cu_seqlens_q[:-1]
    rows_S = (cu_seqlens_q[1:].long() - 1).clamp_(min=0)[has_rows_S]
    known = token_ids_T[rows_S]
    token_ids_T[rows_S] = torch.where(known < 0, last_tokens_C[cells_S[has_rows_S]].clamp(min=0), known)
    block_tables_SB[:S, :count] = packed_tables[first * count : (first + S) * count].view(S, count)
