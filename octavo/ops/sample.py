"""The choice of tokens, where the logits are: temperature, truncation, and a draw that a hash decides.

Shapes: R rows, V vocabulary.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from octavo.ops.dispatch import op
from octavo.ops.noise import exponentials, token_hashes
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
"""As a logit: this token may not be chosen. A finite number, so that a model's own infinities still show."""
OVERFLOWN = torch.finfo(torch.float32).max
"""As a logit: what a penalty made of it is too large for float32."""
GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy, see ``SamplingParams.is_greedy``."""


class SampleParams(NamedTuple):
    """How each row is sampled; tensors of [R] on the logits' device."""

    temperature: Tensor
    """float32; 0 is greedy."""
    min_p: Tensor
    """float32; 0 is off."""
    top_k: Tensor
    """int32; 0, or the vocabulary's size and above, is off."""
    top_p: Tensor
    """float32, above 0; 1 is off."""
    seed: Tensor
    """int64; the bits of the 64-bit key."""
    position: Tensor
    """int32; where in the sequence the token will be."""


@op
def sample(logits_RV: Tensor, params: SampleParams) -> Tensor:
    """Choose a token for each row: int32 [R]; ``NOT_FINITE``, ``NOTHING_LEFT`` or ``OUT_OF_RANGE`` where there is none.

    Temperature, ``min_p``, ``top_k`` and ``top_p`` apply in this order, in float32, each to what the one before
    left, and each keeps the tokens as probable as the last that it keeps. Of what is left, the token of the largest
    ``logit / temperature - log(exponential variate)`` is taken, with the variates of ``noise``; without a temperature
    that of the largest logit, and of equals the first. A row's result depends on that row alone.
    """
    columns = [column.tolist() for column in params]
    tokens = [_choose(logits_V, *row) for logits_V, row in zip(logits_RV, zip(*columns, strict=True), strict=True)]
    return torch.tensor(tokens, dtype=torch.int32, device=logits_RV.device)


def _choose(
    logits_V: Tensor, temperature: float, min_p: float, top_k: int, top_p: float, seed: int, position: int
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
        noise_V = exponentials(token_hashes(len(scores_V), scores_V.device), seed, position).log_()
        cut = least_kept(scores_V, min_p, top_k, top_p)
        scores_V = (scores_V - noise_V).masked_fill(scores_V < cut, -math.inf)
    return int((scores_V == scores_V.max()).nonzero()[0])


def least_kept(scores_V: Tensor, min_p: float, top_k: int, top_p: float) -> Tensor:
    """The score from which on tokens stay in the draw; a scalar.

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
