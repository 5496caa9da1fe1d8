"""``route``: the calls of ``rms_norm`` and ``linear``, then the selection, row by row, in float32.

Of experts, and of groups of them, of equal worth the first is selected.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from octavo.ops.moe import SMALLEST_SUM, Routing, route
from octavo_kernels.cpu.calls import call
from octavo_kernels.cpu.compiled import driver, inlined, task
from octavo_kernels.cpu.linear.linear import linear_numba
from octavo_kernels.cpu.memory import fields, read, view
from octavo_kernels.cpu.rows.columns import declines
from octavo_kernels.cpu.rows.norms import rms_norm_numba
from octavo_kernels.cpu.tensors import address
from octavo_kernels.cpu.threads import run

NUMBERS_A_PIECE = 1024
SCORINGS = ("softmax", "sigmoid", "sqrtsoftplus")
ARGUMENTS = fields(
    "task T piece logits bias correction given ids shares X S groups chosen_groups scoring normalises "
    "corrects_logits scale:float"
)


@inlined
def _best(worth: Any, found: Any, count: int) -> None:
    """Write the places of the ``count`` largest numbers to ``found``, from the largest on: distinct and valid ones,
    even if some are no numbers."""
    for i in range(len(worth)):
        last = min(i, count)
        if last == count and not worth[i] > worth[found[count - 1]]:
            continue
        place = min(last, count - 1)
        while place > 0 and worth[i] > worth[found[place - 1]]:
            found[place] = found[place - 1]
            place -= 1
        found[place] = i


@inlined
def _hide_groups(a: Any, worth: Any) -> None:
    """Set the worth of experts outside the best groups to -inf."""
    size = a.X // a.groups
    values, best = np.empty(a.groups, np.float32), np.empty(a.chosen_groups, np.int64)
    for g in range(a.groups):
        first = second = np.float32(-np.inf)
        for i in range(g * size, (g + 1) * size):
            if worth[i] > first:
                first, second = worth[i], first
            elif worth[i] > second:
                second = worth[i]
        values[g] = first + second if a.correction else first
    _best(values, best, a.chosen_groups)
    is_hidden = np.ones(a.groups, np.bool_)
    for k in range(a.chosen_groups):
        is_hidden[best[k]] = False
    for i in range(a.X):
        if is_hidden[i // size]:
            worth[i] = -np.inf


@inlined
def _score(a: Any, logits: Any, scores: Any) -> None:
    """The scores of logits, by the index in ``SCORINGS``."""
    one, total, largest = np.float32(1), np.float32(0), logits[0]
    for i in range(a.X):
        largest = max(largest, logits[i])
    for i in range(a.X):
        if a.scoring == 1:
            scores[i] = one / (one + np.exp(-logits[i]))
        elif a.scoring == 2:
            scores[i] = np.sqrt(max(logits[i], np.float32(0)) + np.log1p(np.exp(-abs(logits[i]))))
        else:
            scores[i] = np.exp(logits[i] - largest)
            total += scores[i]
    if a.scoring == 0:
        for i in range(a.X):
            scores[i] /= total


@task
def _select_task(arguments: int, begin: int, end: int) -> None:
    """Task over rows."""
    a = read(arguments, ARGUMENTS)
    scores, worth = np.empty(a.X, np.float32), np.empty(a.X, np.float32)
    bias, correction = view(a.bias, a.X, np.float32), view(a.correction, a.X, np.float32)
    for t in range(begin, end):
        logits, given = view(a.logits + 4 * a.X * t, a.X, np.float32), view(a.given + 8 * a.S * t, a.S, np.int64)
        ids, shares = view(a.ids + 8 * a.S * t, a.S, np.int64), view(a.shares + 4 * a.S * t, a.S, np.float32)
        if a.bias:
            for i in range(a.X):
                logits[i] += bias[i]
        _score(a, logits, scores)
        if a.given and given[0] >= 0:
            ids[:] = given
        else:
            for i in range(a.X):
                worth[i] = logits[i] if a.corrects_logits or not a.correction else scores[i]
                if a.correction:
                    worth[i] += correction[i]
            if a.groups > 1:
                _hide_groups(a, worth)
            _best(worth, ids, a.S)
        total = np.float32(0)
        for k in range(a.S):
            shares[k] = scores[ids[k]]
            total += shares[k]
        for k in range(a.S):
            if a.normalises:
                shares[k] /= total + np.float32(SMALLEST_SUM)
            shares[k] *= np.float32(a.scale)


@driver
def _driver(pool: int, arguments: int) -> int:
    """All rows, divided among the threads, if the given ids are those of experts."""
    a = read(arguments, ARGUMENTS)
    given = view(a.given, a.T * a.S, np.int64)
    for p in range(a.T * a.S if a.given else 0):
        if given[p - p % a.S] >= 0 and not 0 <= given[p] < a.X:
            return 1
    run(pool, a.task, arguments, a.T, a.piece)
    return 0


@route.kernel(device="cpu", name="numba", preference=10, supports=declines)
def route_numba(
    x_TD: Tensor, norm_D: Tensor | None, eps: float, weight_XD: Tensor, routing: Routing, given_TS: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """See ``ops.route``."""
    normed_TD = x_TD if norm_D is None else rms_norm_numba(x_TD, norm_D, eps)
    logits_TX = linear_numba(normed_TD, weight_XD)
    (T, X), S = logits_TX.shape, routing.num_chosen
    ids_TS, shares_TS = torch.empty(T, S, dtype=torch.int64), torch.empty(T, S)
    added = [None if x is None else x.float().contiguous() for x in (routing.bias_X, routing.correction_X)]
    given = None if given_TS is None else given_TS.contiguous()
    assert given is None or given.shape == ids_TS.shape, f"experts are given for {list(given.shape)} of {T} rows"
    assert given is None or given.dtype == torch.int64, f"given experts are {given.dtype}, not int64"
    places = (logits_TX.data_ptr(), *map(address, (*added, given)), ids_TS.data_ptr(), shares_TS.data_ptr())
    flags = SCORINGS.index(routing.scoring), routing.normalises, routing.corrects_logits
    how = (*routing.groups, *map(int, flags), routing.scale)
    error = f"route: given experts must be from 0 to {X - 1}"
    call(_driver(), ARGUMENTS, (_select_task(), T, max(1, NUMBERS_A_PIECE // X), *places, X, S, *how), error)
    return normed_TD, ids_TS, shares_TS
