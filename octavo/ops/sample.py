"""Sampling on the logits' device: temperature, truncation, and a draw with hash-based random numbers.

Shapes: R rows, V vocabulary.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from octavo.ops.dispatch import op
from octavo.ops.noise import exponentials, hashes_of
from octavo.steps.messages import NOT_FINITE, NOTHING_LEFT, OUT_OF_RANGE

__all__ = [
    "BANNED",
    "GREEDY_BELOW",
    "NOTHING_LEFT",
    "NOT_FINITE",
    "OUT_OF_RANGE",
    "OVERFLOWN",
    "SampleParams",
    "least_kept",
    "sample",
]

BANNED = torch.finfo(torch.float32).min
"""Logit of a banned token. Finite, so that a model's own infinities are still detected."""
OVERFLOWN = torch.finfo(torch.float32).max
"""Logit that a penalty made too large for float32."""
GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy, see ``SamplingParams.is_greedy``."""


class SampleParams(NamedTuple):
    """Sampling parameters of each row; tensors [R] on the logits' device."""

    temperature: Tensor
    """float32; 0 is greedy."""
    min_p: Tensor
    """float32; 0 is off."""
    top_k: Tensor
    """int32; 0, or at least the vocabulary size, is off."""
    top_p: Tensor
    """float32, above 0; 1 is off."""
    seed: Tensor
    """int64; the bits of the 64-bit key."""
    position: Tensor
    """int32; position of the sampled token in the sequence."""


@op
def sample(logits_RV: Tensor, params: SampleParams, token_ids_V: Tensor | None = None) -> Tensor:
    """Sample a token for each row: int32 [R]; ``NOT_FINITE``, ``NOTHING_LEFT`` or ``OUT_OF_RANGE`` if impossible.

    Temperature, ``min_p``, ``top_k`` and ``top_p`` apply in this order, in float32, each to the tokens left by the
    previous one, and each keeps ties of the last token that it keeps. Of the remaining tokens, the one with the largest
    ``logit / temperature - log(exponential variate)`` is chosen, with the variates of ``noise``; greedy rows choose the
    largest logit, the first of equal ones. A row's result depends on that row alone.

    ``token_ids`` (int64) gives the token of each column, where the columns are a part of a larger vocabulary.
    """
    ids_V = torch.arange(logits_RV.shape[1], device=logits_RV.device) if token_ids_V is None else token_ids_V
    columns = [column.tolist() for column in params]
    tokens = [
        _choose(logits_V, ids_V, *row) for logits_V, row in zip(logits_RV, zip(*columns, strict=True), strict=True)
    ]
    return torch.tensor(tokens, dtype=torch.int32, device=logits_RV.device)


def _choose(
    logits_V: Tensor,
    ids_V: Tensor,
    temperature: float,
    min_p: float,
    top_k: int,
    top_p: float,
    seed: int,
    position: int,
) -> int:
    logits_V = logits_V.float()
    if not logits_V.isfinite().all():
        return NOT_FINITE
    is_greedy = temperature < GREEDY_BELOW
    scores_V = logits_V if is_greedy else logits_V / temperature
    scores_V = scores_V.masked_fill(logits_V == BANNED, -math.inf).masked_fill(logits_V == OVERFLOWN, math.inf)
    best = float(scores_V.max())
    if math.isinf(best):
        return NOTHING_LEFT if best < 0 else OUT_OF_RANGE
    if not is_greedy:
        noise_V = exponentials(hashes_of(ids_V), seed, position).log_()
        cut = least_kept(scores_V, min_p, top_k, top_p)
        scores_V = (scores_V - noise_V).masked_fill(scores_V < cut, -math.inf)
    return int(ids_V[(scores_V == scores_V.max()).nonzero()[0]])


def least_kept(scores_V: Tensor, min_p: float, top_k: int, top_p: float) -> Tensor:
    """The lowest score that truncation keeps; a scalar.

    Sources: ``min_p``: Nguyen et al., arXiv 2407.01082; ``top_p``: Holtzman et al., arXiv 1904.09751.
    """
    sorted_V = scores_V.sort(descending=True).values
    cut = sorted_V[0] + math.log(min_p) if min_p > 0 else sorted_V[-1]
    if 0 < top_k < len(sorted_V):
        cut = torch.maximum(cut, sorted_V[top_k - 1])
    if top_p < 1:
        kept_C = sorted_V[sorted_V >= cut]
        reached_C = kept_C.double().softmax(0).cumsum(0)
        cut = kept_C[min(int((reached_C < top_p).sum()), len(kept_C) - 1)]
    return cut
