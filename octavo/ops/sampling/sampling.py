"""From logits to tokens: adjustments, the draw, and log-probabilities."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from octavo.ops.dispatch import op
from octavo.ops.sampling.noise import exponentials, hashes_of
from octavo.steps.messages import NOT_FINITE, NOTHING_LEFT, OUT_OF_RANGE

# ---- adjust_logits: Logits processors on the logits' device: grammar masks, banned tokens, logit biases and
# penalties. Token counts are not kept per vocabulary entry but recomputed from the tokens themselves, which are
# fewer: the history of each sequence with penalties is on the device, where the next token is known first. Shapes: R
# rows, V vocabulary, S slots of histories, L longest history, B biases, E banned ids, W bytes of a mask.


class Adjustments(NamedTuple):
    """Adjustments of each row; tensors on the logits' device. Ids outside the vocabulary are ignored."""

    history_SL: Tensor
    """int32; tokens of sequences, from the first one."""
    slot_R: Tensor
    """int32; slot of the history that penalties use; -1 for a row without penalties."""
    length_R: Tensor
    """int32; number of tokens of the history before the row."""
    num_prompt_tokens_R: Tensor
    """int32; number of prompt tokens among them."""
    repetition_R: Tensor
    """float32; 1 is off."""
    frequency_R: Tensor
    """float32; 0 is off."""
    presence_R: Tensor
    """float32; 0 is off."""
    bias_ids_RB: Tensor
    """int32; ids are distinct within a row."""
    bias_RB: Tensor
    """float32; added to the logits of these ids; ``BANNED`` bans a token."""
    banned_ids_RE: Tensor
    """int32; banned tokens."""
    mask_RW: Tensor
    """uint8; a token is banned unless bit ``id % 8`` of byte ``id // 8`` is set."""
    has_mask_R: Tensor
    """bool; whether the row's mask applies."""


@op
def adjust_logits(logits_RV: Tensor, adjustments: Adjustments) -> Tensor:
    """Adjusted logits for ``sample``; a new float32 tensor [R, V], computed in float32.

    In this order: the mask; banned tokens; biases; the repetition penalty, which divides positive logits of tokens that
    occurred and multiplies others; then, for output tokens, ``frequency`` per occurrence and ``presence`` once are
    subtracted. Banned logits are and stay ``BANNED``; overflow becomes ``OVERFLOWN``. An input logit that is not finite
    always gives NaN. Sources: CTRL, arXiv 1909.05858, and the OpenAI API.
    """
    R, V = logits_RV.shape
    given_RV = logits_RV.float()
    ids_V = torch.arange(V, device=logits_RV.device)
    is_out_RV = torch.zeros(R, V, dtype=torch.bool, device=logits_RV.device)
    reached = min(V, 8 * adjustments.mask_RW.shape[1])
    bits_RV = adjustments.mask_RW[:, ids_V[:reached] // 8] >> (ids_V[:reached] % 8).to(torch.uint8) & 1
    is_out_RV[:, :reached] = bits_RV == 0
    is_out_RV[:, reached:] = True
    is_out_RV &= adjustments.has_mask_R.unsqueeze(1)
    rows = []
    for r in range(R):
        banned = adjustments.banned_ids_RE[r]
        is_out_RV[r, _known(banned, V)] = True
        biased_V = _biased(given_RV[r], adjustments, r)
        is_out_RV[r] |= biased_V == BANNED
        rows.append(_penalized(biased_V, adjustments, r))
    adjusted_RV = torch.stack(rows) if rows else given_RV
    adjusted_RV = adjusted_RV.masked_fill(is_out_RV, BANNED).clamp(BANNED, OVERFLOWN)
    return adjusted_RV.masked_fill(~given_RV.isfinite(), math.nan)


def _biased(logits_V: Tensor, adjustments: Adjustments, r: int) -> Tensor:
    ids_B = adjustments.bias_ids_RB[r]
    is_known_B = (ids_B >= 0) & (ids_B < len(logits_V))
    return logits_V.index_add(0, ids_B[is_known_B], adjustments.bias_RB[r][is_known_B])


def _penalized(logits_V: Tensor, adjustments: Adjustments, r: int) -> Tensor:
    slot = int(adjustments.slot_R[r])
    if slot < 0:
        return logits_V
    V = len(logits_V)
    tokens = adjustments.history_SL[slot, : int(adjustments.length_R[r])]
    occurs_V = torch.bincount(_known(tokens, V), minlength=V) > 0
    counts_V = torch.bincount(_known(tokens[int(adjustments.num_prompt_tokens_R[r]) :], V), minlength=V)
    repetition = adjustments.repetition_R[r]
    penalized_V = torch.where(logits_V > 0, logits_V / repetition, logits_V * repetition)
    logits_V = torch.where(occurs_V, penalized_V, logits_V)
    subtracted_V = counts_V * adjustments.frequency_R[r] + adjustments.presence_R[r]
    return torch.where(counts_V > 0, logits_V - subtracted_V, logits_V)


def _known(ids: Tensor, V: int) -> Tensor:
    return ids[(ids >= 0) & (ids < V)]


# ---- sample: Sampling on the logits' device: temperature, truncation, and a draw with hash-based random numbers.
# Shapes: R rows, V vocabulary.


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


def processed_logits(logits_RV: Tensor, params: SampleParams) -> Tensor:
    """The logits from which ``sample`` draws: divided by the temperature, those of tokens that it does not keep
    ``BANNED``; float32. Greedy rows stay as they are."""
    is_greedy_R1 = (params.temperature < GREEDY_BELOW).unsqueeze(1)
    temperature_R1 = params.temperature.unsqueeze(1).masked_fill(is_greedy_R1, 1.0)
    scores_RV = (logits_RV.float() / temperature_R1).masked_fill(logits_RV == BANNED, -math.inf)
    sorted_RV = scores_RV.sort(dim=1, descending=True).values
    V = sorted_RV.shape[1]
    cut_R1 = sorted_RV[:, :1] + params.min_p.unsqueeze(1).log()
    top_k_R1 = params.top_k.long().unsqueeze(1)
    kth_R1 = sorted_RV.gather(1, (top_k_R1 - 1).clamp(0, V - 1))
    cut_R1 = torch.where((top_k_R1 > 0) & (top_k_R1 < V), torch.maximum(cut_R1, kth_R1), cut_R1)
    is_kept_RV = sorted_RV >= cut_R1
    reached_RV = sorted_RV.masked_fill(~is_kept_RV, -math.inf).double().softmax(1).cumsum(1)
    last_R1 = (is_kept_RV & (reached_RV < params.top_p.unsqueeze(1))).sum(1, keepdim=True)
    last_R1 = torch.minimum(last_R1, is_kept_RV.sum(1, keepdim=True) - 1)
    cut_R1 = torch.where(params.top_p.unsqueeze(1) < 1, sorted_RV.gather(1, last_R1.clamp(min=0)), cut_R1)
    is_left_out_RV = ((scores_RV < cut_R1) & ~is_greedy_R1) | (scores_RV == -math.inf)
    return scores_RV.masked_fill(is_left_out_RV, BANNED)


# ---- token_logprobs: Log-probabilities of tokens, computed on the logits' device. Shapes: R rows, V vocabulary, n
# likeliest tokens.


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
