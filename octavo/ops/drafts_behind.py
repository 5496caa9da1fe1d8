"""Finds the draft behind each sampled row of a step.

Shapes: T rows, S sequences, R sampled rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.ops.dispatch import op


@op
def drafts_behind(token_ids_T: Tensor, logits_indices_R: Tensor, cu_samples: Tensor) -> Tensor:
    """The token in the row behind each sampled row, int64 [R]; -1 where that is no draft, and for padding.

    The sampled rows ``cu_samples[s]`` to ``cu_samples[s + 1]`` (int32 [S + 1]) belong to sequence s: that of its last
    token and those of its drafts, which are rows ``logits_indices`` (int64) of ``token_ids`` (int64).
    """
    T, R = len(token_ids_T), len(logits_indices_R)
    samples_R, ends_S = torch.arange(R, device=token_ids_T.device), cu_samples[1:].long()
    seq_R = torch.searchsorted(ends_S, samples_R, right=True).clamp(max=len(ends_S) - 1)
    behind_R = token_ids_T[(logits_indices_R + 1).clamp(max=T - 1)]
    return behind_R.masked_fill(samples_R + 1 >= ends_S[seq_R], -1)
