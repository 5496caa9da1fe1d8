"""Truncation of one row's logits: pure functions, in the order of their use.

Each takes float32 [V] and returns a new tensor, in which tokens that are not kept are at minus infinity.

Shapes: V vocabulary.
"""

from __future__ import annotations

import math

from torch import Tensor

NEVER = -math.inf
NUCLEUS_GUESSES = (256, 4096)
"""The nucleus is searched among this many of the best tokens before the entire vocabulary is sorted."""


def keep_min_p(logits_V: Tensor, min_p: float) -> Tensor:
    """Keep tokens at least ``min_p`` times as probable as the most probable one."""
    return _keep_from(logits_V, logits_V.max() + math.log(min_p))


def keep_top_k(logits_V: Tensor, k: int) -> Tensor:
    """Keep the k most probable tokens, and ties of the last of them."""
    if k >= len(logits_V):
        return logits_V
    return _keep_from(logits_V, logits_V.topk(k).values[-1])


def keep_top_p(logits_V: Tensor, top_p: float) -> Tensor:
    """Keep the fewest tokens, most probable first, that together reach ``top_p``, and ties of the last of them.

    Source: Holtzman et al., arXiv 1904.09751.
    """
    total = logits_V.double().logsumexp(0)
    for count in (*NUCLEUS_GUESSES, len(logits_V)):
        best = logits_V.topk(min(count, len(logits_V))).values
        reached = (best.double() - total).exp().cumsum(0)
        if reached[-1] >= top_p:
            break
    last = int((reached < top_p).sum())
    return _keep_from(logits_V, best[min(last, len(best) - 1)])


def _keep_from(logits_V: Tensor, threshold: Tensor) -> Tensor:
    return logits_V.masked_fill(logits_V < threshold, NEVER)
