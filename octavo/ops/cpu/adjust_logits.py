"""``adjust_logits`` row by row, each with only the adjustments of its request.

numpy instead of torch: calls on few numbers cost a fraction. Within a row a banned token is at minus infinity, which no
other adjustment changes.

Shapes: R rows, V vocabulary, B biases.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from octavo.ops.adjust_logits import Adjustments, adjust_logits
from octavo.ops.sample import BANNED, OVERFLOWN

Floats = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int32]


@adjust_logits.kernel(device="cpu", name="rowwise", preference=10, supports=lambda dtype: None)
@np.errstate(all="ignore")
def adjust_logits_by_row(logits_RV: Tensor, adjustments: Adjustments) -> Tensor:
    """See ``ops.adjust_logits``."""
    a = adjustments
    given_RV = logits_RV.float()
    adjusted_RV = given_RV.clone()
    rows_RV: Floats = adjusted_RV.numpy()
    V = rows_RV.shape[1]
    for row in np.flatnonzero(a.has_mask_R.numpy()):
        bits = np.unpackbits(a.mask_RW[row].numpy(), count=V, bitorder="little")
        rows_RV[row, bits == 0] = -math.inf
    for r, ids in _rows_with_ids(a.banned_ids_RE):
        rows_RV[r, _known(ids, V)] = -math.inf
    for r, ids in _rows_with_ids(a.bias_ids_RB):
        is_known = (ids >= 0) & (ids < V)
        bias = a.bias_RB[r].numpy()[is_known]
        rows_RV[r, ids[is_known]] += np.where(bias == BANNED, -math.inf, bias)
    history_SL: Ids = a.history_SL.numpy()
    columns = (a.slot_R, a.length_R, a.num_prompt_tokens_R, a.repetition_R, a.frequency_R, a.presence_R)
    for r, (slot, length, num_prompt_tokens, *penalties) in enumerate(zip(*(c.tolist() for c in columns), strict=True)):
        if slot >= 0:
            _penalize(rows_RV[r], history_SL[slot, :length], num_prompt_tokens, *penalties)
    adjusted_RV.clamp_(BANNED, OVERFLOWN)
    if not math.isfinite(given_RV.sum()):
        adjusted_RV.masked_fill_(~given_RV.isfinite(), math.nan)
    return adjusted_RV


def _rows_with_ids(ids_RB: Tensor) -> Iterator[tuple[Any, Ids]]:
    """The rows with any token id, and their ids; padding is negative."""
    array_RB: Ids = ids_RB.numpy()
    for r in np.flatnonzero(array_RB.max(axis=1, initial=-1) >= 0):
        yield r, array_RB[r]


def _penalize(
    logits_V: Floats, tokens: Ids, num_prompt_tokens: int, repetition: float, frequency: float, presence: float
) -> None:
    """Apply the penalties for ``tokens`` in place."""
    V = len(logits_V)
    if repetition != 1:
        ids = _known(tokens, V)
        logits = logits_V[ids]
        logits_V[ids] = np.where(logits > 0, logits / repetition, logits * repetition)  # the same for each occurrence
    if frequency != 0 or presence != 0:
        ids, counts = np.unique(_known(tokens[num_prompt_tokens:], V), return_counts=True)
        logits_V[ids] -= counts.astype(np.float32) * frequency + presence


def _known(ids: Ids, vocab_size: int) -> Ids:
    return ids[(ids >= 0) & (ids < vocab_size)]
