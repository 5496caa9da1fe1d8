"""``sample`` row by row: greedy rows by one search each, drawn ones over the tokens that truncation leaves.

Shapes: R rows, V vocabulary, C tokens left in the draw.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from octavo.ops.cpu import logits as processors
from octavo.ops.noise import exponentials, token_hashes
from octavo.ops.sample import (
    BANNED,
    GREEDY_BELOW,
    NOT_FINITE,
    NOTHING_LEFT,
    OUT_OF_RANGE,
    OVERFLOWN,
    SampleParams,
    sample,
)


@sample.kernel(device="cpu", name="row by row", preference=10, supports=lambda dtype: None)
def sample_by_row(logits_RV: Tensor, params: SampleParams) -> Tensor:
    """See ``ops.sample``."""
    logits_RV = logits_RV.float()
    tokens_R = torch.from_numpy(logits_RV.numpy().argmax(-1))  # eight times as fast as torch
    best_R = logits_RV.gather(1, tokens_R.unsqueeze(1)).squeeze(1)
    tokens_R = tokens_R.int()
    tokens_R[best_R == BANNED] = NOTHING_LEFT
    tokens_R[best_R == OVERFLOWN] = OUT_OF_RANGE
    is_drawn_R = params.temperature >= GREEDY_BELOW
    if is_drawn_R.any():
        columns = [column.tolist() for column in params]
        for r in is_drawn_R.nonzero()[:, 0].tolist():
            tokens_R[r] = _draw(logits_RV[r], *(column[r] for column in columns))
    is_finite_R = logits_RV.sum(dim=-1).isfinite()
    if not is_finite_R.all():  # banned tokens, too, can make a sum infinite
        tokens_R[~logits_RV.isfinite().all(dim=-1)] = NOT_FINITE
    return tokens_R


def _draw(
    logits_V: Tensor, temperature: float, min_p: float, top_k: int, top_p: float, seed: int, position: int
) -> int:
    if float(logits_V.min()) == BANNED:
        logits_V = logits_V.masked_fill(logits_V == BANNED, processors.NEVER)
    if temperature != 1:
        logits_V = logits_V / temperature
    if min_p > 0:
        logits_V = processors.keep_min_p(logits_V, min_p)
    if top_k > 0:
        logits_V = processors.keep_top_k(logits_V, top_k)
    if top_p < 1:
        logits_V = processors.keep_top_p(logits_V, top_p)
    best = float(logits_V.max())
    if not math.isfinite(best) or best >= OVERFLOWN / temperature:
        return NOTHING_LEFT if best == processors.NEVER else OUT_OF_RANGE
    ids_C = (logits_V > processors.NEVER).nonzero().squeeze(1)
    race_C = logits_V[ids_C] - exponentials(_hashes(len(logits_V))[ids_C], seed, position).log_()
    return int(ids_C[race_C.argmax()])


@functools.lru_cache(maxsize=4)
def _hashes(vocab_size: int) -> Tensor:
    return token_hashes(vocab_size, torch.device("cpu"))
