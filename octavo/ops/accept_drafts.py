"""Counts the drafts that a step accepts.

Shapes: T rows, S sequences, R sampled rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.ops.dispatch import op


@op
def accept_drafts(tokens_R: Tensor, token_ids_T: Tensor, logits_indices_R: Tensor, cu_samples: Tensor) -> Tensor:
    """The number of accepted drafts of each sequence; int32 [S].

    The sampled rows ``cu_samples[s]`` to ``cu_samples[s + 1]`` (int32 [S + 1]) belong to sequence s: that of its last
    token and those of its drafts, which are rows ``logits_indices`` (int64) of ``token_ids`` (int64). A draft is
    accepted if it, and all before it, are the tokens (int32) sampled in the rows before them.
    """
    T, S = len(token_ids_T), len(cu_samples) - 1
    R = torch.arange(len(tokens_R), device=tokens_R.device)
    begins_S, ends_S = cu_samples[:-1].long(), cu_samples[1:].long()
    seq_R = torch.searchsorted(ends_S, R, right=True).clamp(max=S - 1)
    is_draft_R = ends_S[seq_R] > R + 1
    drafts_R = token_ids_T[(logits_indices_R + 1).clamp(max=T - 1)]
    is_end_R = ~(is_draft_R & (tokens_R.long() == drafts_R))
    first_end_R = torch.where(is_end_R & (ends_S[-1] > R), R - begins_S[seq_R], T)
    found_S = torch.full_like(begins_S, T).scatter_reduce_(0, seq_R, first_end_R, "amin")
    return found_S.masked_fill_(ends_S == begins_S, 0).int()
