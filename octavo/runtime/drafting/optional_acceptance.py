"""Other rules by which drafts are accepted than "the token that would be sampled anyway".

Shapes: R sampled rows, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from octavo import ops
from octavo.ops.sampling.noise import row_exponentials
from octavo.ops.sampling.sampling import BANNED, GREEDY_BELOW, OVERFLOWN, SampleParams
from octavo.speculative_config import Acceptance

Verify = Callable[[Tensor, SampleParams, Tensor], Tensor]
"""Tokens, int32 [R], for adjusted logits [R, V], and the draft behind each row, int64 [R], negative if there is none.
The draft is accepted where it is the token."""

ACCEPT_STREAM, RESIDUAL_STREAM, DRAFT_STREAM = 1 << 28, 1 << 29, 1 << 30
"""Added to positions, which are lower: each use of random numbers has its own. Drafters that sample for the rule
``distribution`` use the last."""


def rule(acceptance: Acceptance, length: float | None, num_drafts: int) -> Verify | None:
    """The rule of a setting; ``length`` is the mean number of tokens of ``synthetic`` with ``num_drafts`` drafts.

    ``None``: tokens are sampled as without drafts.
    """
    if acceptance == "exact":
        return None
    if acceptance == "distribution":
        return distribution
    assert length is not None
    rate = acceptance_rate(length, num_drafts)
    return lambda logits_RV, params, drafts_R: synthetic(logits_RV, params, drafts_R, rate)


def distribution(
    logits_RV: Tensor, params: SampleParams, drafts_R: Tensor, draft_probs_RV: Tensor | None = None
) -> Tensor:
    """Rejection sampling (Leviathan et al., arXiv 2211.17192): the tokens have the distribution of the model.

    A draft x is accepted with probability min(1, p(x) / q(x)), and replaced by a draw from max(p - q, 0) otherwise; p
    is what ``ops.sample`` draws from, after truncation, and q (float32 [R, V]) what the draft was drawn from; ``None``:
    the draft was certain.
    """
    tokens_R = ops.sample(logits_RV, params)
    verified_R = verified(probabilities(logits_RV, params), params, drafts_R.clamp(min=0), draft_probs_RV)
    return torch.where((drafts_R < 0) | (tokens_R < 0), tokens_R, verified_R)


def verified(probs_RV: Tensor, params: SampleParams, drafts_R: Tensor, draft_probs_RV: Tensor | None = None) -> Tensor:
    """The accepted draft of each row, or the token in its place; int32 [R]."""
    at_R1 = drafts_R.unsqueeze(1)
    if draft_probs_RV is None:
        draft_probs_RV = torch.zeros_like(probs_RV).scatter_(1, at_R1, 1.0)
    uniform_R = torch.exp(-row_exponentials(1, params.seed, params.position + ACCEPT_STREAM).squeeze(1))
    is_accepted_R = uniform_R * draft_probs_RV.gather(1, at_R1).squeeze(1) < probs_RV.gather(1, at_R1).squeeze(1)
    rest_RV = (probs_RV - draft_probs_RV).clamp_(min=0)
    rest_RV = torch.where(rest_RV.sum(dim=1, keepdim=True) > 0, rest_RV, probs_RV)
    noise_RV = row_exponentials(probs_RV.shape[1], params.seed, params.position + RESIDUAL_STREAM)
    return torch.where(is_accepted_R, drafts_R, (rest_RV / noise_RV).argmax(dim=1)).int()


def synthetic(logits_RV: Tensor, params: SampleParams, drafts_R: Tensor, rate: float) -> Tensor:
    """Drafts are accepted with probability ``rate``, whatever the model says: for measurements of speed alone."""
    tokens_R = ops.sample(logits_RV, params)
    positions_R = params.position + ACCEPT_STREAM
    return ops.accept_by_chance(tokens_R, drafts_R, params.seed, positions_R, rate, logits_RV.shape[1])


def acceptance_rate(length: float, num_drafts: int) -> float:
    """The rate r at which the mean number of tokens, 1 + r + ... + r ** num_drafts, is ``length``."""
    low, high = 0.0, 1.0
    for _ in range(60):
        rate = (low + high) / 2
        if sum(rate**count for count in range(num_drafts + 1)) < length:
            low = rate
        else:
            high = rate
    return high


def probabilities(logits_RV: Tensor, params: SampleParams) -> Tensor:
    """The distribution that ``ops.sample`` draws from; float32 [R, V]. Rows of which nothing can be drawn are any."""
    is_greedy_R1 = (params.temperature < GREEDY_BELOW).unsqueeze(1)
    logits_RV = logits_RV.float()
    temperature_R1 = params.temperature.clamp(min=GREEDY_BELOW).unsqueeze(1)
    scores_RV = torch.where(is_greedy_R1, logits_RV, logits_RV / temperature_R1)
    scores_RV = scores_RV.masked_fill(logits_RV == BANNED, -math.inf).masked_fill(logits_RV == OVERFLOWN, math.inf)
    cut_R1 = torch.where(is_greedy_R1, scores_RV.amax(dim=1, keepdim=True), _least_kept(scores_RV, params))
    kept_RV = scores_RV.masked_fill(scores_RV < cut_R1, -math.inf)
    first_R1 = kept_RV.argmax(dim=1, keepdim=True)
    greedy_RV = torch.zeros_like(scores_RV).scatter_(1, first_R1, 1.0)
    return torch.where(is_greedy_R1, greedy_RV, kept_RV.softmax(dim=1))


def _least_kept(scores_RV: Tensor, params: SampleParams) -> Tensor:
    """``ops.sample.least_kept`` of each row, [R, 1]."""
    V = scores_RV.shape[1]
    sorted_RV = scores_RV.sort(dim=1, descending=True).values
    min_p_R1, top_k_R1, top_p_R1 = (x.unsqueeze(1) for x in (params.min_p, params.top_k.long(), params.top_p))
    least_R1 = torch.where(min_p_R1 > 0, sorted_RV[:, :1] + min_p_R1.log(), sorted_RV[:, -1:])
    has_top_k_R1 = (top_k_R1 > 0) & (top_k_R1 < V)
    kth_R1 = sorted_RV.gather(1, torch.where(has_top_k_R1, top_k_R1 - 1, V - 1))
    cut_R1 = torch.maximum(least_R1, kth_R1)
    is_kept_RV = sorted_RV >= cut_R1
    reached_RV = sorted_RV.double().masked_fill(~is_kept_RV, -math.inf).softmax(dim=1).cumsum(dim=1)
    num_below_R1 = (reached_RV < top_p_R1).sum(dim=1, keepdim=True)
    last_R1 = torch.minimum(num_below_R1, is_kept_RV.sum(dim=1, keepdim=True) - 1).clamp(min=0)
    return torch.where(top_p_R1 < 1, sorted_RV.gather(1, last_R1), cut_R1)
