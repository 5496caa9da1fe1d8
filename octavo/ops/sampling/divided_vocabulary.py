"""Sampling from a vocabulary that is divided among ranks, without gathering its logits.

Each rank sends a few numbers for each row: its best token, the winner of its part of the draw and, for rows with
truncation, its most likely tokens. From all ranks' numbers each rank finds the same token, which is the one that
``ops.sample`` would choose from all logits. Where the most likely tokens do not decide, the token is ``UNDECIDED``.

Shapes: W ranks, R rows, V this rank's part of the vocabulary, K numbers of a row, C most likely tokens of a rank.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from octavo.ops.sampling.noise import exponentials
from octavo.ops.sampling.sampling import (
    BANNED,
    GREEDY_BELOW,
    NOT_FINITE,
    NOTHING_LEFT,
    OUT_OF_RANGE,
    OVERFLOWN,
    SampleParams,
)

UNDECIDED = -4
NEVER = -math.inf
MOST = 128
"""Tokens that a rank sends for a row with truncation. A nucleus is rarely wider; if one is, the row is gathered."""
IS_FINITE, BEST, BEST_ID, WINNER, WINNER_ID, TOTAL, FLOOR, HEAD = range(8)
"""Columns: whether all logits are finite; the largest logit and its token; the largest score in the draw and its token;
the logarithm of the sum over all scores' exponentials; the largest score that is not sent."""

Numbers = npt.NDArray[np.float64]


def is_truncated(params: SampleParams) -> Tensor:
    """Whether each row samples from a truncated distribution, bool [R]."""
    truncates = (params.min_p > 0) | (params.top_k > 0) | (params.top_p < 1)
    return truncates & (params.temperature >= GREEDY_BELOW)


def find_candidates(logits_RV: Tensor, params: SampleParams, hashes_V: Tensor, first: int) -> Tensor:
    """This rank's numbers of each row, float64 [R, K]; ``hashes_V`` are those of its tokens, which begin at ``first``.

    K is equal on all ranks: it depends on ``params`` alone.
    """
    logits_RV = logits_RV.float()
    array_RV = logits_RV.numpy()
    truncated = is_truncated(params).tolist()
    found_RK = np.zeros((len(array_RV), HEAD + (2 * MOST if any(truncated) else 0)))
    ids_R = array_RV.argmax(-1)
    found_RK[:, BEST], found_RK[:, BEST_ID] = np.take_along_axis(array_RV, ids_R[:, None], 1)[:, 0], ids_R + first
    found_RK[:, IS_FINITE] = [  # banned tokens, too, can make the sum infinite
        math.isfinite(total) or bool(np.isfinite(array_V).all())
        for total, array_V in zip(logits_RV.sum(-1).tolist(), array_RV, strict=True)
    ]
    columns = (params.temperature, params.seed, params.position)
    for r, (temperature, seed, position) in enumerate(zip(*(c.tolist() for c in columns), strict=True)):
        if temperature < GREEDY_BELOW or not found_RK[r, IS_FINITE]:
            continue
        scores_V = logits_RV[r].masked_fill(logits_RV[r] == BANNED, NEVER) / temperature
        if truncated[r]:
            _add_most_likely(found_RK[r], scores_V, first)
        else:
            index, score = _winner(scores_V, hashes_V, seed, position)
            found_RK[r, WINNER], found_RK[r, WINNER_ID] = score, first + index
    return torch.from_numpy(found_RK)


def _winner(scores_C: Tensor, hashes_C: Tensor, seed: int, position: int) -> tuple[int, float]:
    """The index of the token that wins the draw among those with a score, and its score in it."""
    left = (scores_C > NEVER).nonzero().squeeze(1)
    if not len(left):
        return 0, NEVER
    race = scores_C[left] - exponentials(hashes_C[left], seed, position).log_()
    best = int(race.argmax())
    return int(left[best]), float(race[best])


def _add_most_likely(found_K: Numbers, scores_V: Tensor, first: int) -> None:
    count = min(MOST, len(scores_V))
    best = scores_V.topk(count)
    found_K[TOTAL] = float(scores_V.double().logsumexp(0))
    found_K[FLOOR] = float(best.values[-1]) if count < len(scores_V) else NEVER
    found_K[HEAD : HEAD + MOST] = NEVER
    found_K[HEAD : HEAD + count] = best.values.numpy()
    found_K[HEAD + MOST : HEAD + MOST + count] = best.indices.numpy() + first


def choose_tokens(found_WRK: Tensor, params: SampleParams, hashes: Tensor) -> Tensor:
    """The token of each row, int32 [R], from all ranks' numbers; ``hashes`` are those of the whole vocabulary.

    ``UNDECIDED`` for a row whose truncation keeps tokens that were not sent; else as ``ops.sample``.
    """
    found = found_WRK.numpy()
    tokens: list[int] = []
    for r, row in enumerate(zip(*(column.tolist() for column in params), strict=True)):
        tokens.append(_choose(found[:, r], hashes, *row))
    return torch.tensor(tokens, dtype=torch.int32)


def _choose(
    found_WK: Numbers,
    hashes: Tensor,
    temperature: float,
    min_p: float,
    top_k: int,
    top_p: float,
    seed: int,
    position: int,
) -> int:
    if not found_WK[:, IS_FINITE].all():
        return NOT_FINITE
    rank = int(found_WK[:, BEST].argmax())
    best = float(found_WK[rank, BEST])
    if best in (BANNED, OVERFLOWN):
        return NOTHING_LEFT if best == BANNED else OUT_OF_RANGE
    if temperature < GREEDY_BELOW:
        return int(found_WK[rank, BEST_ID])
    highest = float(torch.tensor(best) / temperature)
    if not math.isfinite(highest) or highest >= OVERFLOWN / temperature:
        return OUT_OF_RANGE
    if not (min_p > 0 or top_k > 0 or top_p < 1):
        return int(found_WK[found_WK[:, WINNER].argmax(), WINNER_ID])
    cut = _cut(found_WK, highest, min_p, top_k if top_k < len(hashes) else 0, top_p)
    if cut is None:
        return UNDECIDED
    scores, ids = found_WK[:, HEAD : HEAD + MOST].ravel(), found_WK[:, HEAD + MOST :].ravel()
    is_kept = (scores >= cut) & (scores > NEVER)
    order = ids[is_kept].argsort()
    ids_C = torch.from_numpy(ids[is_kept][order]).long()
    index, _ = _winner(torch.from_numpy(scores[is_kept][order]).float(), hashes[ids_C], seed, position)
    return int(ids_C[index])


def _cut(found_WK: Numbers, highest: float, min_p: float, top_k: int, top_p: float) -> float | None:
    """The lowest score that truncation keeps; ``None`` if tokens that were not sent may be above it."""
    scores = found_WK[:, HEAD : HEAD + MOST].ravel()
    scores = -np.sort(-scores[scores > NEVER])
    floor, cut = float(found_WK[:, FLOOR].max()), NEVER
    total = float(np.logaddexp.reduce(found_WK[:, TOTAL]))
    if min_p > 0:
        cut = float(torch.tensor(highest) + math.log(min_p))
    if top_k > 0:
        cut = max(cut, float(scores[top_k - 1]) if top_k <= len(scores) else NEVER)
    if min_p > 0 or top_k > 0:
        if cut <= floor and floor > NEVER:
            return None
        scores = scores[scores >= cut]
        total = float(np.logaddexp.reduce(scores))
    if top_p < 1:
        reached = np.exp(scores - total).cumsum()
        last = int((reached < top_p).sum())
        if last == len(scores) and min_p <= 0 and top_k <= 0 and floor > NEVER:
            return None
        cut = float(scores[min(last, len(scores) - 1)])
    return None if cut <= floor and floor > NEVER else cut
