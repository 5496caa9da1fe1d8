"""The ends of a step on a device that runs ahead of the host: its inputs, and the results that stay there."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from octavo.ops.dispatch import op

# ---- pull_step: First kernel of a step: fetches its inputs from the host. A copy by the copy engine before a graph
# delays the graph by some 20 microseconds; a kernel in the graph does not. Shapes: Q steps in the ring of inputs, B
# bytes.


@op
def pull_step(inputs_B: Tensor, uploads_QB: Tensor, counter: Tensor) -> None:
    """Copy row ``counter % Q`` of ``uploads`` (uint8, in pinned host memory) to ``inputs`` (uint8).

    ``counter`` is int32 [1]. A row begins with an int64: its number of eight-byte words, this one included.
    """
    row_B = uploads_QB[int(counter) % len(uploads_QB)]
    end = 8 * int(row_B[:8].view(torch.int64))
    inputs_B[:end] = row_B[:end]


# ---- stage_step: Completes a step's inputs on the device, where the results of the previous step are known. Shapes:
# T rows, S sequences, R sampled rows, G KV groups, B entries of the widest block table, C cells of the state, K
# drafts of a sequence.


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


# ---- publish_tokens: Final kernel of a step: publishes its tokens to the next step and to the host. Shapes: S
# sequences, R sampled rows, C cells of the state, Q steps in the ring of results, N numbers of a result.


@op
def publish_tokens(
    tokens_R: Tensor,
    positions_R: Tensor,
    cells_S: Tensor,
    last_tokens_C: Tensor,
    last_positions_C: Tensor,
    results_QN: Tensor,
    counter: Tensor,
    num_accepted_S: Tensor | None = None,
    cu_samples: Tensor | None = None,
) -> None:
    """Write the tokens (int32), then ``num_accepted`` (int32), to row ``counter % Q`` of results, and each sequence's
    last token with its position (int32) to its cell (int64); increment ``counter``.

    The last token of a sequence is that of its first sampled row ``cu_samples[s]`` plus the number of its accepted
    drafts; ``None``: row s. Several sequences may share the padding cell. ``results`` (int32) may be in pinned host
    memory; ``counter`` is int32 [1].
    """
    R, row_N = len(tokens_R), results_QN[int(counter) % len(results_QN)]
    row_N[:R] = tokens_R
    last_S = torch.arange(len(cells_S), device=tokens_R.device)
    if num_accepted_S is not None and cu_samples is not None:
        row_N[R : R + len(num_accepted_S)] = num_accepted_S
        last_S = (cu_samples[:-1] + num_accepted_S).long().clamp(max=R - 1)
    last_tokens_C[cells_S] = tokens_R[last_S]
    last_positions_C[cells_S] = positions_R[last_S]
    counter += 1


# ---- next_tokens: Finds what follows each row of a step, once its tokens are sampled and its drafts accepted or
# rejected. Shapes: T rows, S sequences, R sampled rows.


class NextTokens(NamedTuple):
    """What follows the rows of a step."""

    tokens_T: Tensor
    """int64: the token behind each row; behind a rejected draft any token, behind padding 0."""
    last_rows_S: Tensor
    """int64: the row behind which the newest token of each sequence was sampled."""
    last_samples_S: Tensor
    """int64: the sampled row of that token."""


@op
def next_tokens(
    token_ids_T: Tensor,
    cu_seqlens_q: Tensor,
    cu_samples: Tensor | None,
    num_accepted_S: Tensor | None,
    tokens_R: Tensor,
    given_S: Tensor,
    vocab_size: int,
) -> NextTokens:
    """The token behind each row (int64 ``token_ids``), and each sequence's newest token.

    Rows ``cu_seqlens_q[s]`` to ``cu_seqlens_q[s + 1]`` (int32 [S + 1]) are those of sequence s. Its last rows are
    sampled: as many as ``cu_samples`` (int32 [S + 1]) says, or one; ``tokens`` (int32) are what was sampled,
    ``num_accepted`` (int32) its accepted drafts. Where ``given`` (int32) is not negative, it is the token behind a
    chunk of a prompt. While kernels are compiled, ``tokens`` have any content.
    """
    T, S, R = len(token_ids_T), len(given_S), len(tokens_R)
    rows_T = torch.arange(T, device=token_ids_T.device)
    ends_S = cu_seqlens_q[1:].long()
    seq_T = torch.searchsorted(ends_S, rows_T, right=True).clamp(max=S - 1)
    first_samples_S, num_samples_S = torch.arange(S, device=token_ids_T.device), torch.ones_like(ends_S)
    if cu_samples is not None:
        first_samples_S = cu_samples[:-1].long()
        num_samples_S = cu_samples[1:].long() - first_samples_S
    nth_T = rows_T - (ends_S - num_samples_S)[seq_T]
    sampled_T = tokens_R[(first_samples_S[seq_T] + nth_T).clamp(0, R - 1)].long().clamp(0, vocab_size - 1)
    given_T = given_S[seq_T].long()
    behind_T = torch.where(nth_T >= 0, torch.where(given_T >= 0, given_T, sampled_T), token_ids_T.roll(-1))
    rejected_S = torch.zeros_like(ends_S)
    if num_accepted_S is not None:
        rejected_S = (num_samples_S - 1 - num_accepted_S).clamp(min=0)
    return NextTokens(
        behind_T.masked_fill(rows_T >= ends_S[-1], 0),
        (ends_S - 1 - rejected_S).clamp(min=0),
        (first_samples_S + num_samples_S - 1 - rejected_S).clamp(0, R - 1),
    )
