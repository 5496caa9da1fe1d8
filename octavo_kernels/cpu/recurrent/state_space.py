"""``state_space`` in one call: time steps and decays by rows, then the recurrence by blocks of columns."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from octavo.ops.recurrent.recurrence import StateRows
from octavo.ops.recurrent.state_space import StateSpaceHeads, state_space
from octavo_kernels.cpu.calls import call
from octavo_kernels.cpu.compiled import driver, task
from octavo_kernels.cpu.memory import fields, keep, read, view
from octavo_kernels.cpu.recurrent.recurrence import (
    PLAIN,
    STATE,
    decay_row,
    fits,
    recur_all,
    recur_task,
    rows_of,
    state_arguments,
)
from octavo_kernels.cpu.tensors import FORMATS, declines_activations, rows_at
from octavo_kernels.cpu.threads import run
from octavo_kernels.cpu.vector_ir import LANES

ROWS_A_PIECE = 16
ARGUMENTS = fields(STATE, "prepare dt dt_stride a_log dt_bias low:float high:float")


@task
def _prepare_task(arguments: int, begin: int, end: int) -> None:
    """Task over rows."""
    a = read(arguments, ARGUMENTS)
    padded, limits = np.zeros((5, (a.N + LANES - 1) // LANES * LANES), np.float32), np.empty(2, np.float32)
    limits[0], limits[1] = a.low, a.high
    a_log, bias = view(a.a_log, a.N, np.float32), view(a.dt_bias, a.N, np.float32)
    for t in range(begin, end):
        at = 4 * t * a.N
        steps, decays = view(a.beta + at, a.N, np.float32), view(a.decay + at, a.N, np.float32)
        decay_row(a.dt + t * a.dt_stride, bias, a_log, limits, padded, steps, decays)
    keep((padded, limits))


@driver
def _driver(pool: int, arguments: int) -> int:
    a = read(arguments, ARGUMENTS)
    if not fits(a):
        return 1
    decays, steps = np.empty(a.T * a.N, np.float32), np.empty(a.T * a.N, np.float32)
    a.decay, a.beta = decays.ctypes.data, steps.ctypes.data
    run(pool, a.prepare, arguments, a.T, ROWS_A_PIECE)
    recur_all(pool, arguments)
    keep((decays, steps))
    return 0


@state_space.kernel(device="cpu", name="numba", preference=10, supports=declines_activations)
def state_space_numba(xbc_TC: Tensor, dt_TN: Tensor, heads: StateSpaceHeads, state: Tensor, rows: StateRows) -> Tensor:
    """See ``ops.state_space``. Raises ``IndexError`` when rows or slots do not fit the tensors."""
    T, N, P, G, K = len(xbc_TC), heads.num_heads, heads.head_dim, heads.num_groups, heads.state_size
    shapes = [list(x.shape[1:]) for x in (xbc_TC, dt_TN, state)]
    if shapes != [[sum(heads.sizes)], [N], [N, K, P]] or state.dtype not in FORMATS:
        raise ValueError(f"state_space: {N} heads of {P}, {G} groups of {K}; columns and state {shapes}, {state.dtype}")
    xbc, dt = rows_of(xbc_TC), rows_of(dt_TN.float())
    a_log, dt_bias, d = (x.float().contiguous() for x in (heads.a_log_N, heads.dt_bias_N, heads.d_N))
    out = torch.empty(T, N * P)
    x, stride = rows_at(xbc)
    b = x + 4 * N * P
    values = (
        *(*state_arguments(rows, T, state), recur_task(FORMATS[state.dtype], PLAIN), N, K, P),
        *(b + 4 * G * K, b, stride, N // G, x, stride, 0, 0, d.data_ptr(), out.data_ptr()),
        *(_prepare_task(), *rows_at(dt), a_log.data_ptr(), dt_bias.data_ptr(), *heads.dt_limits),
    )
    call(_driver(), ARGUMENTS, values, "state_space: rows or slots do not fit the tensors")
    return out
