"""Finds what follows each row of a step, once its tokens are sampled and its drafts accepted or rejected.

Shapes: T rows, S sequences, R sampled rows.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from octavo.ops.dispatch import op


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
