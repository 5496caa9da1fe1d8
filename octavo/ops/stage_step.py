"""Completes a step's inputs on the device, where the results of the previous step are known.

Shapes: T rows, S sequences, R sampled rows, G KV groups, B entries of the widest block table, C cells of the state,
K drafts of a sequence.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from octavo.ops.dispatch import op


class StagedRows(NamedTuple):
    """A step's rows besides their token ids; corrected in place, except where their sequences begin and end."""

    positions_T: Tensor
    """int64"""
    slots_GT: Tensor
    """int64"""
    sample_positions_R: Tensor
    """int32; position of each sampled token."""
    seq_lens_S: Tensor
    """int32"""
    cu_seqlens_q: Tensor
    """int32 [S + 1]: the rows of each sequence."""
    cu_samples: Tensor | None
    """int32 [S + 1]: the sampled rows of each sequence, one more than its drafts; ``None``: each has one."""
    cells_S: Tensor
    """int64; index of each sequence in the state."""


class LastResults(NamedTuple):
    """What the last step of each sequence gave, by cell."""

    tokens_C: Tensor
    """int32; the last sampled token, negative for an error."""
    positions_C: Tensor
    """int32; its position, or -1 if the last step failed."""
    drafts_CK: Tensor | None
    """int32; what the drafter proposes behind it."""


@op
def stage_step(
    token_ids_T: Tensor,
    rows: StagedRows,
    last: LastResults,
    packed_tables: Tensor,
    width: Tensor,
    block_tables_GSB: Tensor,
    block_size: int,
) -> None:
    """Fill in tokens, positions and block tables, in place.

    A sequence whose first token in ``token_ids`` (int64) is negative takes its last token, or 0 if that is an error. If
    that token's position is lower than planned, since drafts were rejected, then positions, slots and lengths are
    lowered by the difference. Negative tokens of drafts become those of the drafter, in order. ``packed_tables``
    (int32, flat) holds ``width`` (int32 [1]) entries for each sequence of the first group, then for those of the next
    group; they become the first entries of ``block_tables``, whose first S rows are used.
    """
    T, S, G, count = len(token_ids_T), len(rows.cells_S), len(block_tables_GSB), int(width)
    tables_GSB = packed_tables[: G * S * count].view(G, S, count)
    block_tables_GSB[:, :S, :count] = tables_GSB
    begins_S, ends_S = rows.cu_seqlens_q[:-1].long(), rows.cu_seqlens_q[1:].long()
    first_rows_S = begins_S.clamp(max=T - 1)
    is_pending_S = (ends_S > begins_S) & (token_ids_T[first_rows_S] < 0)
    known_S = last.positions_C[rows.cells_S].long()
    shift_S = (rows.positions_T[first_rows_S] - known_S).masked_fill(~is_pending_S | (known_S < 0), 0)

    rows_T = torch.arange(T, device=token_ids_T.device)
    seq_T = torch.searchsorted(ends_S, rows_T, right=True).clamp(max=S - 1)
    is_row_T = rows_T < ends_S[-1]
    num_drafts_S = torch.zeros_like(begins_S)
    if rows.cu_samples is not None:
        num_drafts_S = (rows.cu_samples[1:] - rows.cu_samples[:-1]).long().sub(1).clamp(min=0)
    nth_draft_T = rows_T - (ends_S - num_drafts_S)[seq_T]
    cells_T = rows.cells_S[seq_T]
    found_T = last.tokens_C[cells_T]
    if last.drafts_CK is not None:
        drafts_T = last.drafts_CK[cells_T, nth_draft_T.clamp(0, last.drafts_CK.shape[1] - 1)]
        found_T = torch.where(nth_draft_T >= 0, drafts_T, found_T)
    is_unknown_T = (token_ids_T < 0) & is_row_T
    token_ids_T.copy_(torch.where(is_unknown_T, found_T.clamp(min=0).long(), token_ids_T))

    shift_T = shift_S[seq_T].masked_fill(~is_row_T, 0)
    rows.positions_T.sub_(shift_T)
    rows.seq_lens_S.sub_(shift_S.int())
    if rows.cu_samples is None:
        rows.sample_positions_R.sub_(shift_S.int())
    else:
        samples_R = torch.arange(len(rows.sample_positions_R), device=token_ids_T.device)
        seq_R = torch.searchsorted(rows.cu_samples[1:], samples_R, right=True).clamp(max=S - 1)
        rows.sample_positions_R.sub_(shift_S[seq_R].masked_fill(samples_R >= rows.cu_samples[-1], 0).int())
    blocks_GT = tables_GSB[:, seq_T, (rows.positions_T // block_size).clamp(0, count - 1)].long()
    slots_GT = blocks_GT * block_size + rows.positions_T % block_size
    rows.slots_GT.copy_(torch.where(shift_T > 0, slots_GT, rows.slots_GT))
