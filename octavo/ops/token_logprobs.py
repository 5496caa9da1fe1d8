"""Log-probabilities of tokens, computed on the logits' device.

Shapes: R rows, V vocabulary, n likeliest tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from octavo.ops.dispatch import op


class Logprobs(NamedTuple):
    """Per row: its token's log-probability and rank, and the likeliest tokens, most likely first."""

    logprob_R: Tensor
    """float32."""
    rank_R: Tensor
    """int32; 1 when no token is more likely."""
    top_ids_Rn: Tensor
    """int32; ties in order of ids."""
    top_logprobs_Rn: Tensor
    """float32."""


@op
def token_logprobs(logits_RV: Tensor, tokens_R: Tensor, n: int) -> Logprobs:
    """Log-probabilities of ``tokens`` (int32) and of the ``n`` likeliest tokens, 0 to V, in float32.

    Rows whose token is negative are skipped: their results are unspecified.
    """
    logprobs_RV = logits_RV.float().log_softmax(dim=1)
    token_R1 = tokens_R.clamp(min=0).long().unsqueeze(1)
    ranks_R = (logits_RV > logits_RV.gather(1, token_R1)).sum(dim=1) + 1
    top_ids_Rn = logits_RV.float().sort(dim=1, descending=True, stable=True).indices[:, :n]
    chosen_R = logprobs_RV.gather(1, token_R1).squeeze(1)
    return Logprobs(chosen_R, ranks_R.to(torch.int32), top_ids_Rn.to(torch.int32), logprobs_RV.gather(1, top_ids_Rn))
