"""The draw of tokens, and log-probabilities."""

from __future__ import annotations

import functools

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from octavo.ops.sampling.noise import hashes_of, token_hashes
from octavo.ops.sampling.sampling import (
    BANNED,
    GREEDY_BELOW,
    NOT_FINITE,
    NOTHING_LEFT,
    OUT_OF_RANGE,
    OVERFLOWN,
    Logprobs,
    SampleParams,
    sample,
    token_logprobs,
)
from octavo_kernels.cpu.calls import call, task_driver
from octavo_kernels.cpu.compiled import driver, task
from octavo_kernels.cpu.host import FLOAT_FEATURES, missing
from octavo_kernels.cpu.memory import fields, keep, read, view
from octavo_kernels.cpu.sampling.sample_row import key_of, sample_row
from octavo_kernels.cpu.sampling.sort_keys import ALL_BUT_SIGN, flipped, of_sort_key
from octavo_kernels.cpu.threads import run

# ---- sample: ``sample`` in compiled code, a row at a time on each thread. Shapes: R rows, V columns.


ARGUMENTS = fields("task R piece V logits hashes tokens temperature min_p top_k top_p seed position")  # fmt: skip


@task
def sample_task(arguments: int, begin: int, end: int) -> None:
    """Task over rows. ``tokens`` are the greedy ones, or error codes, and those of other rows are replaced."""
    a = read(arguments, ARGUMENTS)
    tokens, hashes = view(a.tokens, a.R, np.int32), view(a.hashes, a.V, np.uint32)
    temperature, min_p = view(a.temperature, a.R, np.float32), view(a.min_p, a.R, np.float32)
    top_k, top_p = view(a.top_k, a.R, np.int32), view(a.top_p, a.R, np.float32)
    seed, position = view(a.seed, a.R, np.int64), view(a.position, a.R, np.int32)
    for r in range(begin, end):
        if tokens[r] >= 0 and temperature[r] >= GREEDY_BELOW:
            logits = view(a.logits + 4 * r * a.V, a.V, np.float32)
            key = key_of(seed[r], position[r])
            tokens[r] = sample_row(logits, hashes, tokens[r], temperature[r], min_p[r], top_k[r], top_p[r], key)


@sample.kernel(device="cpu", name="numba", preference=10, supports=lambda dtype: missing(FLOAT_FEATURES))
def sample_numba(logits_RV: Tensor, params: SampleParams, token_ids_V: Tensor | None = None) -> Tensor:
    """See ``ops.sample``."""
    logits_RV = logits_RV.float().contiguous()
    tokens_R, (R, V) = best_tokens(logits_RV), logits_RV.shape
    if bool((params.temperature >= GREEDY_BELOW).any()):
        hashes_V = _hashes(V) if token_ids_V is None else _hashes_of(token_ids_V)
        columns = [column.contiguous() for column in params]
        places = (logits_RV.data_ptr(), hashes_V.ctypes.data, tokens_R.data_ptr(), *(c.data_ptr() for c in columns))
        call(task_driver(), ARGUMENTS, (sample_task(), R, 1, V, *places))
    if token_ids_V is not None:
        tokens_R = torch.where(tokens_R >= 0, token_ids_V[tokens_R.clamp(min=0)].int(), tokens_R)
    return tokens_R


@functools.lru_cache(maxsize=4)
def _hashes(vocab_size: int) -> npt.NDArray[np.uint32]:
    return token_hashes(vocab_size, torch.device("cpu")).numpy().astype(np.uint32)


@functools.lru_cache(maxsize=4)
def _hashes_of(token_ids_V: Tensor) -> npt.NDArray[np.uint32]:
    """``token_ids`` are the same tensor in every step."""
    return hashes_of(token_ids_V).numpy().astype(np.uint32)


# ---- token_logprobs: ``token_logprobs`` of the rows that request it, by top-k selection instead of a sort. Shapes: R
# rows, A requesting rows, V vocabulary, C tokens at least as likely as the n-th, n likeliest tokens.


@token_logprobs.kernel(device="cpu", name="top-k", preference=10, supports=lambda dtype: None)
def token_logprobs_by_top_k(logits_RV: Tensor, tokens_R: Tensor, n: int) -> Logprobs:
    """See ``ops.token_logprobs``."""
    R, tokens = len(logits_RV), tokens_R.numpy()
    asks_A = np.flatnonzero(tokens >= 0)
    logits_AV = logits_RV if len(asks_A) == R else logits_RV[torch.from_numpy(asks_A)]
    logprobs_AV = logits_AV.float().log_softmax(dim=1)
    ids_An, values_An = _likeliest(logprobs_AV, n)
    array_AV = logprobs_AV.numpy()
    chosen_A = array_AV[np.arange(len(asks_A)), tokens[asks_A]]
    ranks_A = np.count_nonzero(array_AV > chosen_A[:, None], axis=1) + 1
    if len(asks_A) == R:
        return Logprobs(torch.from_numpy(chosen_A), torch.from_numpy(ranks_A).int(), ids_An.int(), values_An)
    found = Logprobs(
        torch.zeros(R), torch.zeros(R, dtype=torch.int32), torch.zeros(R, n, dtype=torch.int32), torch.zeros(R, n)
    )
    for column, values in zip(found, (chosen_A, ranks_A, ids_An.numpy(), values_An.numpy()), strict=True):
        column.numpy()[asks_A] = values
    return found


def _likeliest(logprobs_AV: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """The ids and log-probabilities of the ``n`` likeliest tokens of each row, ties in order of ids."""
    values_AC, ids_AC = logprobs_AV.topk(min(n + 1, logprobs_AV.shape[1]), dim=1)
    array_AC = values_AC.numpy()
    for row in np.flatnonzero((array_AC[:, 1:] == array_AC[:, :-1]).any(axis=1)):
        ids_C = (logprobs_AV[row] >= values_AC[row, -1]).nonzero()[:, 0]
        order_C = logprobs_AV[row][ids_C].sort(descending=True, stable=True).indices
        ids_AC[row] = ids_C[order_C][: ids_AC.shape[1]]
    return ids_AC[:, :n], values_AC[:, :n]


BLOCK = 4096
"""Less than a microsecond of work."""
INFINITY = 0x7F800000
BEST_ARGUMENTS = fields("task x tokens largest R V B")
"""``largest`` int32 [R, B, 2] is set by the driver: the largest number of each block and the largest without signs."""


@task
def _best_task(arguments: int, begin: int, end: int) -> None:
    """Task over the blocks of all rows."""
    a = read(arguments, BEST_ARGUMENTS)
    largest = view(a.largest, 2 * a.R * a.B, np.int32)
    for item in range(begin, end):
        first = item % a.B * BLOCK
        bits = view(a.x + 4 * (item // a.B * a.V + first), min(BLOCK, a.V - first), np.int32)
        most, widest = np.int32(~ALL_BUT_SIGN), np.int32(0)
        for i in range(len(bits)):
            most = max(most, flipped(bits[i]))
            widest = max(widest, bits[i] & ALL_BUT_SIGN)
        largest[2 * item], largest[2 * item + 1] = most, widest


@driver
def _driver(pool: int, arguments: int) -> int:
    a = read(arguments, BEST_ARGUMENTS)
    a.B = (a.V + BLOCK - 1) // BLOCK
    largest = np.empty((a.R, a.B, 2), np.int32)
    a.largest = largest.ctypes.data
    run(pool, a.task, arguments, a.R * a.B, 1)
    tokens = view(a.tokens, a.R, np.int32)
    for r in range(a.R):
        block, widest = 0, np.int32(0)
        for b in range(a.B):
            if of_sort_key(largest[r, b, 0]) > of_sort_key(largest[r, block, 0]):
                block = b
            widest = max(widest, largest[r, b, 1])
        place, best = block * BLOCK, of_sort_key(largest[r, block, 0])
        x = view(a.x + 4 * r * a.V, a.V, np.float32)
        while place < a.V - 1 and x[place] != best:
            place += 1
        if widest >= INFINITY:
            place = NOT_FINITE
        elif best == BANNED:
            place = NOTHING_LEFT
        elif best == OVERFLOWN:
            place = OUT_OF_RANGE
        tokens[r] = place
    keep(largest)
    return 0


def best_tokens(x_RV: Tensor) -> Tensor:
    """int32 [R]: the place of the first largest number of each row of float32 ``x``, or an error code as of
    ``ops.sample``; rows must have at least one number."""
    if missing(FLOAT_FEATURES) is not None:
        return _plain_best_tokens(x_RV)
    x_RV, (R, V) = x_RV.contiguous(), x_RV.shape
    tokens_R = torch.empty(R, dtype=torch.int32)
    call(_driver(), BEST_ARGUMENTS, (_best_task(), x_RV.data_ptr(), tokens_R.data_ptr(), 0, R, V, 0))
    return tokens_R


def _plain_best_tokens(x_RV: Tensor) -> Tensor:
    best_R, places_R = x_RV.amax(dim=1), torch.from_numpy(x_RV.numpy().argmax(axis=1)).int()
    places_R[best_R == BANNED] = NOTHING_LEFT
    places_R[best_R == OVERFLOWN] = OUT_OF_RANGE
    places_R[~x_RV.isfinite().all(dim=1)] = NOT_FINITE
    return places_R
