"""``sample`` row by row: greedy rows by an argmax, others by a draw over the tokens that truncation keeps.

Shapes: R rows, V vocabulary, C tokens left in the draw.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from octavo.ops.cpu import truncation
from octavo.ops.cpu.best_tokens import best_tokens
from octavo.ops.cpu.race import can_narrow, possible_winners
from octavo.ops.cpu.threads import num_threads
from octavo.ops.noise import exponentials, hashes_of, key_of, token_hashes
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

MOST_THREADS = 8
"""More would wait for the interpreter lock."""


@sample.kernel(device="cpu", name="rowwise", preference=10, supports=lambda dtype: None)
def sample_by_row(logits_RV: Tensor, params: SampleParams, token_ids_V: Tensor | None = None) -> Tensor:
    """See ``ops.sample``."""
    logits_RV = logits_RV.float()
    tokens_R = best_tokens(logits_RV)
    temperatures = params.temperature.tolist()
    if max(temperatures, default=0.0) >= GREEDY_BELOW:
        _draw_rows(logits_RV, params, temperatures, tokens_R, token_ids_V)
    if token_ids_V is not None:
        tokens_R = torch.where(tokens_R >= 0, token_ids_V[tokens_R.clamp(min=0)].int(), tokens_R)
    return tokens_R


def _draw_rows(
    logits_RV: Tensor, params: SampleParams, temperatures: list[float], tokens_R: Tensor, token_ids_V: Tensor | None
) -> None:
    """Replace the tokens of rows that are not greedy and whose logits are finite."""
    hashes_V = _hashes(logits_RV.shape[1]) if token_ids_V is None else hashes_of(token_ids_V)
    columns = list(zip(*(column.tolist() for column in params), strict=True))
    best = tokens_R.tolist()
    drawn = [r for r, t in enumerate(temperatures) if t >= GREEDY_BELOW and best[r] != NOT_FINITE]

    @torch.inference_mode()
    def draw(r: int) -> int:
        return _draw(logits_RV[r], hashes_V, *columns[r])

    for r, token in zip(drawn, _for_each(draw, drawn), strict=True):
        tokens_R[r] = token


def _for_each(draw: Callable[[int], int], rows: list[int]) -> Iterable[int]:
    """The results of ``draw``, computed by several threads: torch's operations run without the interpreter lock."""
    if len(rows) < 2 or num_threads() == 1:
        return map(draw, rows)
    with ThreadPoolExecutor(min(num_threads(), len(rows), MOST_THREADS)) as threads:
        return threads.map(draw, rows)


def _draw(
    logits_V: Tensor,
    hashes_V: Tensor,
    temperature: float,
    min_p: float,
    top_k: int,
    top_p: float,
    seed: int,
    position: int,
) -> int:
    if float(logits_V.min()) == BANNED:
        logits_V = logits_V.masked_fill(logits_V == BANNED, truncation.NEVER)
    if temperature != 1:
        logits_V = logits_V / temperature
    if min_p > 0:
        logits_V = truncation.keep_min_p(logits_V, min_p)
    if top_k > 0:
        logits_V = truncation.keep_top_k(logits_V, top_k)
    if top_p < 1:
        logits_V = truncation.keep_top_p(logits_V, top_p)
    best = float(logits_V.max())
    if not math.isfinite(best) or best >= OVERFLOWN / temperature:
        return NOTHING_LEFT if best == truncation.NEVER else OUT_OF_RANGE
    if min_p == 0 and top_k == 0 and top_p == 1 and can_narrow():
        first_C = torch.tensor([int(logits_V.numpy().argmax())])  # in numpy, eight times as fast
        reached = float(_scores(logits_V, hashes_V, first_C, seed, position))
        ids_C = possible_winners(logits_V.contiguous(), _short(hashes_V), key_of(seed, position), reached)
    else:
        ids_C = (logits_V > truncation.NEVER).nonzero().squeeze(1)
    return int(ids_C[_scores(logits_V, hashes_V, ids_C, seed, position).argmax()])


def _scores(logits_V: Tensor, hashes_V: Tensor, ids_C: Tensor, seed: int, position: int) -> Tensor:
    return logits_V[ids_C] - exponentials(hashes_V[ids_C], seed, position).log_()


@functools.lru_cache(maxsize=4)
def _short(hashes_V: Tensor) -> npt.NDArray[np.uint32]:
    return hashes_V.numpy().astype(np.uint32)


@functools.lru_cache(maxsize=4)
def _hashes(vocab_size: int) -> Tensor:
    return token_hashes(vocab_size, torch.device("cpu"))
