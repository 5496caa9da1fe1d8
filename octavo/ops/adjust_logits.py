"""What requests change about their logits, where the logits are: masks, bans, biases and penalties.

Which tokens occurred is not kept as numbers for the whole vocabulary but found anew in the tokens themselves, which
are fewer: the history of each sequence that asks lies on the device, where the next token is known first.

Shapes: R rows, V vocabulary, S slots of histories, L longest history, B biases, E banned ids, W bytes of a mask.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from octavo.ops.dispatch import op
from octavo.ops.sample import BANNED, OVERFLOWN


class Adjustments(NamedTuple):
    """What is changed about each row; tensors on the logits' device. Ids outside the vocabulary are passed over."""

    history_SL: Tensor
    """int32; tokens of sequences from their first on."""
    slot_R: Tensor
    """int32; whose history penalties look at; -1 for a row without penalties."""
    length_R: Tensor
    """int32; how many tokens of the history are in front of the row."""
    num_prompt_tokens_R: Tensor
    """int32; how many of them are the prompt."""
    repetition_R: Tensor
    """float32; 1 is off."""
    frequency_R: Tensor
    """float32; 0 is off."""
    presence_R: Tensor
    """float32; 0 is off."""
    bias_ids_RB: Tensor
    """int32; no id twice in a row."""
    bias_RB: Tensor
    """float32; what is added to the logits of these ids; ``BANNED`` takes a token out."""
    banned_ids_RE: Tensor
    """int32; tokens that are out."""
    mask_RW: Tensor
    """uint8; a token is out unless bit ``id % 8`` of byte ``id // 8`` is set."""
    has_mask_R: Tensor
    """bool; whether the row's mask counts."""


@op
def adjust_logits(logits_RV: Tensor, adjustments: Adjustments) -> Tensor:
    """Logits as ``sample`` is to have them; new, float32 [R, V], worked out in float32.

    In this order: the mask; the banned tokens; biases; the repetition penalty, by which positive logits of tokens that
    occurred are divided and others multiplied; then, for tokens of the output, ``frequency`` for each occurrence and
    ``presence`` once are subtracted. What is out is ``BANNED`` and stays it, what gets too large is ``OVERFLOWN``. A
    logit that is not a finite number gives NaN whatever is asked. Sources: CTRL, arXiv 1909.05858, and the OpenAI API.
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
