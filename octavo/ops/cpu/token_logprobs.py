"""``token_logprobs`` of the rows that request it, by top-k selection instead of a sort.

Shapes: R rows, A requesting rows, V vocabulary, C tokens at least as likely as the n-th, n likeliest tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.ops.token_logprobs import Logprobs, token_logprobs


@token_logprobs.kernel(device="cpu", name="top-k", preference=10, supports=lambda dtype: None)
def token_logprobs_by_top_k(logits_RV: Tensor, tokens_R: Tensor, n: int) -> Logprobs:
    """See ``ops.token_logprobs``."""
    R = len(logits_RV)
    asks_A = (tokens_R >= 0).nonzero()[:, 0]
    logprobs_AV = logits_RV[asks_A].float().log_softmax(dim=1)
    chosen_A1 = logprobs_AV.gather(1, tokens_R[asks_A].long().unsqueeze(1))
    ids_An = _likeliest(logprobs_AV, n)
    found = Logprobs(
        torch.zeros(R),
        torch.zeros(R, dtype=torch.int32),
        torch.zeros(R, n, dtype=torch.int32),
        torch.zeros(R, n),
    )
    found.logprob_R[asks_A] = chosen_A1[:, 0]
    found.rank_R[asks_A] = (logprobs_AV > chosen_A1).sum(dim=1).int() + 1
    found.top_ids_Rn[asks_A] = ids_An.int()
    found.top_logprobs_Rn[asks_A] = logprobs_AV.gather(1, ids_An)
    return found


def _likeliest(logprobs_AV: Tensor, n: int) -> Tensor:
    """The ``n`` likeliest tokens of each row, ties in order of ids."""
    values_AC, ids_AC = logprobs_AV.topk(min(n + 1, logprobs_AV.shape[1]), dim=1)
    for row in (values_AC[:, 1:] == values_AC[:, :-1]).any(dim=1).nonzero()[:, 0].tolist():
        ids_C = (logprobs_AV[row] >= values_AC[row, -1]).nonzero()[:, 0]
        order_C = logprobs_AV[row][ids_C].sort(descending=True, stable=True).indices
        ids_AC[row] = ids_C[order_C][: ids_AC.shape[1]]
    return ids_AC[:, :n]
