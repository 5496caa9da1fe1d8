"""``enter_streams`` and ``leave_streams`` for CPUs, in float32: a thread takes rows, and none depends on another."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from octavo.ops.hyper_connections import Mixed, StreamMaps, enter_streams, leave_streams
from octavo_kernels.cpu.calls import call, task_driver
from octavo_kernels.cpu.compiled import inlined, rarely_used, task
from octavo_kernels.cpu.linear.linear import linear_numba
from octavo_kernels.cpu.memory import fields, keep, read, view
from octavo_kernels.cpu.rows.columns import declines

ENTER = fields("task T piece x given base scales sum post mix S D iterations eps:float norm_eps:float")
LEAVE = fields("task T piece y x post mix out S D")
NUMBERS_A_PIECE = 4096
ONE = np.float32(1)


@inlined
def _balance(mix: Any, S: int, eps: Any, of_rows: bool) -> None:
    """Divide the rows of a matrix, or its columns, by their sums."""
    for i in range(S):
        total = eps
        for j in range(S):
            total += mix[i * S + j] if of_rows else mix[j * S + i]
        for j in range(S):
            at = i * S + j if of_rows else j * S + i
            mix[at] /= total


@rarely_used
@task
def _enter_task(arguments: int, begin: int, end: int) -> None:
    a = read(arguments, ENTER)
    S, D, count, eps = a.S, a.D, a.S * (a.S + 2), np.float32(a.eps)
    base, scales = view(a.base, count, np.float32), view(a.scales, 3, np.float32)
    pre = np.empty(S, np.float32)
    for t in range(begin, end):
        x, given = view(a.x + 4 * t * S * D, S * D, np.float32), view(a.given + 4 * t * count, count, np.float32)
        post, mix = view(a.post + 4 * t * S, S, np.float32), view(a.mix + 4 * t * S * S, S * S, np.float32)
        squares = np.float32(0)
        for i in range(S * D):
            squares += x[i] * x[i]
        factor = ONE / np.sqrt(squares / np.float32(S * D) + np.float32(a.norm_eps))
        for i in range(S):
            pre[i] = ONE / (ONE + np.exp(-(given[i] * factor * scales[0] + base[i]))) + eps
            post[i] = np.float32(2) / (ONE + np.exp(-(given[S + i] * factor * scales[1] + base[S + i])))
            largest, total = np.float32(-np.inf), np.float32(0)
            for j in range(2 * S + i * S, 2 * S + (i + 1) * S):
                mix[j - 2 * S] = given[j] * factor * scales[2] + base[j]
                largest = max(largest, mix[j - 2 * S])
            for j in range(i * S, (i + 1) * S):
                mix[j] = np.exp(mix[j] - largest)
                total += mix[j]
            for j in range(i * S, (i + 1) * S):
                mix[j] = mix[j] / total + eps
        _balance(mix, S, eps, False)
        for _ in range(a.iterations - 1):
            _balance(mix, S, eps, True)
            _balance(mix, S, eps, False)
        out = view(a.sum + 4 * t * D, D, np.float32)
        out[:] = 0
        for i in range(S):
            for d in range(D):
                out[d] += pre[i] * x[i * D + d]
    keep(pre)


@rarely_used
@task
def _leave_task(arguments: int, begin: int, end: int) -> None:
    a = read(arguments, LEAVE)
    S, D = a.S, a.D
    for t in range(begin, end):
        x, y = view(a.x + 4 * t * S * D, S * D, np.float32), view(a.y + 4 * t * D, D, np.float32)
        post, mix = view(a.post + 4 * t * S, S, np.float32), view(a.mix + 4 * t * S * S, S * S, np.float32)
        for j in range(S):
            out = view(a.out + 4 * (t * S + j) * D, D, np.float32)
            for d in range(D):
                out[d] = post[j] * y[d]
            for i in range(S):
                for d in range(D):
                    out[d] += mix[i * S + j] * x[i * D + d]


@enter_streams.kernel(device="cpu", name="numba", preference=10, supports=declines)
def enter_streams_numba(x_TX: Tensor, maps: StreamMaps) -> Mixed:
    """See ``ops.enter_streams``."""
    (T, X), S, x_TX = x_TX.shape, maps.num_streams, x_TX.contiguous()
    given_TM = linear_numba(x_TX, maps.weight_MX)
    sum_TD, post_TS, mix_TSS = torch.empty(T, X // S), torch.empty(T, S), torch.empty(T, S, S)
    tensors = x_TX, given_TM, maps.base_M, maps.scales, sum_TD, post_TS, mix_TSS
    sizes = S, X // S, maps.iterations, maps.eps, maps.norm_eps
    values = (_enter_task(), T, max(1, NUMBERS_A_PIECE // X), *(tensor.data_ptr() for tensor in tensors), *sizes)
    call(task_driver(), ENTER, values)
    return Mixed(sum_TD, post_TS, mix_TSS)


@leave_streams.kernel(device="cpu", name="numba", preference=10, supports=declines)
def leave_streams_numba(y_TD: Tensor, x_TX: Tensor, post_TS: Tensor, mix_TSS: Tensor) -> Tensor:
    """See ``ops.leave_streams``."""
    (T, D), S = y_TD.shape, post_TS.shape[1]
    tensors = *(x.contiguous() for x in (y_TD, x_TX, post_TS, mix_TSS)), torch.empty(T, S * D)
    places = (tensor.data_ptr() for tensor in tensors)
    call(task_driver(), LEAVE, (_leave_task(), T, max(1, NUMBERS_A_PIECE // (S * D)), *places, S, D))
    return tensors[-1]
