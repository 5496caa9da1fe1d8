"""Logits processors on the logits' device: grammar masks, banned tokens, logit biases and penalties.

Token counts are not kept per vocabulary entry but recomputed from the tokens themselves, which are fewer: the history
of each sequence with penalties is on the device, where the next token is known first.

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
