"""``adjust_logits`` row by row, each with only the adjustments of its request.

Shapes: R rows, V vocabulary.
"""

from __future__ import annotations

import math

from torch import Tensor

from octavo.ops.adjust_logits import Adjustments, adjust_logits
from octavo.ops.cpu import logits as processors
from octavo.ops.sample import BANNED, OVERFLOWN


@adjust_logits.kernel(device="cpu", name="rowwise", preference=10, supports=lambda dtype: None)
def adjust_logits_by_row(logits_RV: Tensor, adjustments: Adjustments) -> Tensor:
    """See ``ops.adjust_logits``."""
    a = adjustments
    given_RV = logits_RV.float()
    adjusted_RV = given_RV.clone()
    for r in a.has_mask_R.nonzero()[:, 0].tolist():
        adjusted_RV[r] = processors.apply_mask(adjusted_RV[r], a.mask_RW[r].numpy())
    for r in (a.banned_ids_RE >= 0).any(1).nonzero()[:, 0].tolist():
        adjusted_RV[r] = processors.ban(adjusted_RV[r], a.banned_ids_RE[r].tolist())
    for r in (a.bias_ids_RB >= 0).any(1).nonzero()[:, 0].tolist():
        adjusted_RV[r] = _biased(adjusted_RV[r], a.bias_ids_RB[r], a.bias_RB[r])
    columns = (a.slot_R, a.length_R, a.num_prompt_tokens_R, a.repetition_R, a.frequency_R, a.presence_R)
    for r, (slot, length, num_prompt_tokens, *penalties) in enumerate(zip(*(c.tolist() for c in columns), strict=True)):
        if slot >= 0:
            tokens = a.history_SL[slot, :length].tolist()
            adjusted_RV[r] = _penalized(adjusted_RV[r], tokens, num_prompt_tokens, *penalties)
    adjusted_RV.clamp_(BANNED, OVERFLOWN)
    if not given_RV.sum(dim=-1).isfinite().all():
        adjusted_RV.masked_fill_(~given_RV.isfinite(), math.nan)
    return adjusted_RV


def _biased(logits_V: Tensor, ids_B: Tensor, bias_B: Tensor) -> Tensor:
    is_given_B = ids_B >= 0
    bias = dict(zip(ids_B[is_given_B].tolist(), bias_B[is_given_B].tolist(), strict=True))
    logits_V = processors.add_bias(logits_V, {token: added for token, added in bias.items() if added != BANNED})
    return processors.ban(logits_V, [token for token, added in bias.items() if added == BANNED])


def _penalized(
    logits_V: Tensor,
    tokens: list[int],
    num_prompt_tokens: int,
    repetition: float,
    frequency: float,
    presence: float,
) -> Tensor:
    if repetition != 1:
        logits_V = processors.penalize_repetition(logits_V, tokens, repetition)
    if frequency != 0 or presence != 0:
        logits_V = processors.penalize_output(logits_V, tokens[num_prompt_tokens:], frequency, presence)
    return logits_V
