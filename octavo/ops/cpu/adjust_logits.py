"""``adjust_logits`` row by row, each with only what its request asks for.

Shapes: R rows, V vocabulary.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from octavo.ops.adjust_logits import Adjustments, adjust_logits
from octavo.ops.cpu import logits as processors
from octavo.ops.sample import BANNED, OVERFLOWN


@adjust_logits.kernel(device="cpu", name="row by row", preference=10, supports=lambda dtype: None)
def adjust_logits_by_row(logits_RV: Tensor, adjustments: Adjustments) -> Tensor:
    """See ``ops.adjust_logits``."""
    given_RV = logits_RV.float()
    adjusted_RV = torch.empty_like(given_RV)
    for r, logits_V in enumerate(given_RV):
        adjusted_RV[r] = _adjusted(logits_V, adjustments, r)
    adjusted_RV.clamp_(BANNED, OVERFLOWN)
    is_finite_R = given_RV.sum(dim=-1).isfinite()
    if not is_finite_R.all():
        adjusted_RV.masked_fill_(~given_RV.isfinite(), math.nan)
    return adjusted_RV


def _adjusted(logits_V: Tensor, a: Adjustments, r: int) -> Tensor:
    if a.has_mask_R[r]:
        logits_V = processors.apply_mask(logits_V, a.mask_RW[r].numpy())
    banned = [token for token in a.banned_ids_RE[r].tolist() if token >= 0]
    if banned:
        logits_V = processors.ban(logits_V, banned)
    is_given_B = a.bias_ids_RB[r] >= 0
    if is_given_B.any():
        ids, added = a.bias_ids_RB[r][is_given_B].tolist(), a.bias_RB[r][is_given_B].tolist()
        bias = dict(zip(ids, added, strict=True))
        logits_V = processors.add_bias(logits_V, {token: b for token, b in bias.items() if b != BANNED})
        logits_V = processors.ban(logits_V, [token for token, b in bias.items() if b == BANNED])
    slot = int(a.slot_R[r])
    return logits_V if slot < 0 else _penalized(logits_V, a, r, slot)


def _penalized(logits_V: Tensor, a: Adjustments, r: int, slot: int) -> Tensor:
    tokens = a.history_SL[slot, : int(a.length_R[r])]
    repetition, frequency, presence = float(a.repetition_R[r]), float(a.frequency_R[r]), float(a.presence_R[r])
    if repetition != 1:
        logits_V = processors.penalize_repetition(logits_V, tokens.tolist(), repetition)
    if frequency != 0 or presence != 0:
        output = tokens[int(a.num_prompt_tokens_R[r]) :].tolist()
        logits_V = processors.penalize_output(logits_V, output, frequency, presence)
    return logits_V
