"""``token_logprobs`` row by row, of those that ask, by a search for the likeliest tokens in place of a sort.

Shapes: R rows, V vocabulary, C tokens no less likely than the last of them, n likeliest tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.ops.token_logprobs import Logprobs, token_logprobs


@token_logprobs.kernel(device="cpu", name="row by row", preference=10, supports=lambda dtype: None)
def token_logprobs_by_row(logits_RV: Tensor, tokens_R: Tensor, n: int) -> Logprobs:
    """See ``ops.token_logprobs``."""
    R = len(logits_RV)
    found = Logprobs(
        torch.zeros(R),
        torch.zeros(R, dtype=torch.int32),
        torch.zeros(R, n, dtype=torch.int32),
        torch.zeros(R, n),
    )
    for r, token in enumerate(tokens_R.tolist()):
        if token >= 0:
            logprobs_V = logits_RV[r].float().log_softmax(dim=0)
            found.logprob_R[r] = logprobs_V[token]
            found.rank_R[r] = int((logprobs_V > logprobs_V[token]).sum()) + 1
            ids_n = _likeliest(logprobs_V, n)
            found.top_ids_Rn[r] = ids_n
            found.top_logprobs_Rn[r] = logprobs_V[ids_n]
    return found


def _likeliest(logprobs_V: Tensor, n: int) -> Tensor:
    """The ``n`` likeliest tokens, of equals the smaller id first."""
    if n == 0:
        return torch.zeros(0, dtype=torch.int64)
    ids_C = (logprobs_V >= logprobs_V.topk(n).values[-1]).nonzero()[:, 0]
    return ids_C[logprobs_V[ids_C].sort(descending=True, stable=True).indices][:n]
