"""``token_logprobs`` of the rows that request it, by top-k selection instead of a sort.

Shapes: R rows, A requesting rows, V vocabulary, C tokens at least as likely as the n-th, n likeliest tokens.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from octavo.ops.sampling import Logprobs, token_logprobs


@token_logprobs.kernel(device="cpu", name="top-k", preference=10, supports=lambda dtype: None)
def token_logprobs_by_top_k(logits_RV: Tensor, tokens_R: Tensor, n: int) -> Logprobs:
    """See ``ops.token_logprobs``."""
    R, tokens = len(logits_RV), tokens_R.numpy()
    asks_A = np.flatnonzero(tokens >= 0)
    logits_AV = logits_RV if len(asks_A) == R else logits_RV[torch.from_numpy(asks_A)]
    logprobs_AV = logits_AV.float().log_softmax(dim=1)
    ids_An, values_An = _likeliest(logprobs_AV, n)
    array_AV = logprobs_AV.numpy()
    chosen_A = array_AV[np.arange(len(asks_A)), tokens[asks_A]]
    ranks_A = np.count_nonzero(array_AV > chosen_A[:, None], axis=1) + 1
    if len(asks_A) == R:
        return Logprobs(torch.from_numpy(chosen_A), torch.from_numpy(ranks_A).int(), ids_An.int(), values_An)
    found = Logprobs(
        torch.zeros(R),
        torch.zeros(R, dtype=torch.int32),
        torch.zeros(R, n, dtype=torch.int32),
        torch.zeros(R, n),
    )
    for column, values in zip(found, (chosen_A, ranks_A, ids_An.numpy(), values_An.numpy()), strict=True):
        column.numpy()[asks_A] = values
    return found


def _likeliest(logprobs_AV: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """The ids and log-probabilities of the ``n`` likeliest tokens of each row, ties in order of ids."""
    values_AC, ids_AC = logprobs_AV.topk(min(n + 1, logprobs_AV.shape[1]), dim=1)
    array_AC = values_AC.numpy()
    for row in np.flatnonzero((array_AC[:, 1:] == array_AC[:, :-1]).any(axis=1)):
        ids_C = (logprobs_AV[row] >= values_AC[row, -1]).nonzero()[:, 0]
        order_C = logprobs_AV[row][ids_C].sort(descending=True, stable=True).indices
        ids_AC[row] = ids_C[order_C][: ids_AC.shape[1]]
    return ids_AC[:, :n], values_AC[:, :n]
