"""``gated_delta`` in one call: queries, keys and decays are prepared by rows, then the recurrence by blocks of columns,
then the outputs' norms by rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from octavo.ops.recurrent.gated_delta import L2_EPS, DeltaHeads, gated_delta
from octavo.ops.recurrent.recurrence import StateRows
from octavo_kernels.cpu.calls import call
from octavo_kernels.cpu.compiled import driver, inlined, task
from octavo_kernels.cpu.memory import fields, keep, read, view
from octavo_kernels.cpu.recurrent.gated_norm import GATES, normalise_group, squares
from octavo_kernels.cpu.recurrent.recurrence import (
    DELTA,
    DELTA_BY_CHANNEL,
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

NUMBERS_A_PIECE = 4096
ARGUMENTS = fields(
    STATE,
    "num_decays prepare finish qkv qkv_stride G dt dt_stride raw_beta beta_stride gate gate_stride a_log dt_bias "
    "norm eps:float kind beta_scale:float lowest:float tile result",
)
"""Fields of STATE that are addresses of inputs and outputs of the recurrence are set by the driver; ``G`` key heads;
``tile``: value heads of a key head that are as many outputs apart as there are key heads, 1 for none."""


@inlined
def _unit(source: int, out: Any, scale: Any, padded: Any) -> None:
    """A query or a key, divided by its L2 norm, times a scale; ``padded`` is scratch with zeros behind the numbers."""
    x, total = view(source, len(out), np.float32), np.empty(1, np.float32)
    for i in range(len(out)):
        padded[i] = x[i]
    squares(padded.ctypes.data, len(padded) // LANES, total.ctypes.data)
    factor = scale / np.sqrt(total[0] + np.float32(L2_EPS))
    for i in range(len(out)):
        out[i] = x[i] * factor


@task
def _prepare_task(arguments: int, begin: int, end: int) -> None:
    """Task over rows."""
    a = read(arguments, ARGUMENTS)
    count = a.N * a.num_decays
    padded = np.zeros((5, (count + LANES - 1) // LANES * LANES), np.float32)
    key = np.zeros((a.K + LANES - 1) // LANES * LANES, np.float32)
    a_log, bias = view(a.a_log, a.N, np.float32), view(a.dt_bias, count, np.float32)
    limits, steps, scale = (
        np.array([a.lowest, np.inf], np.float32),
        np.empty(count, np.float32),
        np.float32(a.K) ** -0.5,
    )
    for t in range(begin, end):
        for head in range(a.G):
            at, source = 4 * (t * a.G + head) * a.K, a.qkv + t * a.qkv_stride + 4 * head * a.K
            _unit(source, view(a.q + at, a.K, np.float32), np.float32(scale), key)
            _unit(source + 4 * a.G * a.K, view(a.k + at, a.K, np.float32), np.float32(1), key)
        decays = view(a.decay + 4 * t * count, count, np.float32)
        decay_row(a.dt + t * a.dt_stride, bias, a_log, limits, padded, steps, decays)
        raw = view(a.raw_beta + t * a.beta_stride, a.N, np.float32)
        beta = view(a.beta + 4 * t * a.N, a.N, np.float32)
        for n in range(a.N):
            beta[n] = np.float32(a.beta_scale) / (np.float32(1) + np.exp(-raw[n]))
    keep((padded, key, limits, steps))


@task
def _finish_task(arguments: int, begin: int, end: int) -> None:
    """Task over rows and heads."""
    a = read(arguments, ARGUMENTS)
    padded = np.zeros((2, (a.V + LANES - 1) // LANES * LANES), np.float32)
    for index in range(begin, end):
        t, n = index // a.N, index % a.N
        gate, place = a.gate + t * a.gate_stride + 4 * n * a.V, n % a.tile * (a.N // a.tile) + n // a.tile
        result = a.result + 4 * (t * a.N + place) * a.V
        normalise_group(a.out + 4 * index * a.V, gate, a.norm, result, a.V, a.eps, a.kind, 0, padded)
    keep(padded)


@driver
def _driver(pool: int, arguments: int) -> int:
    a = read(arguments, ARGUMENTS)
    if not fits(a):
        return 1
    keys, decays = np.empty((2, a.T * a.G * a.K), np.float32), np.empty(a.T * a.N * a.num_decays, np.float32)
    betas, outputs = np.empty(a.T * a.N, np.float32), np.empty(a.T * a.N * a.V, np.float32)
    a.q, a.k, a.key_stride, a.share = keys[0].ctypes.data, keys[1].ctypes.data, 4 * a.G * a.K, a.N // a.G
    a.v, a.value_stride = a.qkv + 8 * a.G * a.K, a.qkv_stride
    a.decay, a.beta, a.out = decays.ctypes.data, betas.ctypes.data, outputs.ctypes.data
    run(pool, a.prepare, arguments, a.T, max(1, NUMBERS_A_PIECE // (2 * a.G * a.K + a.N * a.num_decays)))
    recur_all(pool, arguments)
    run(pool, a.finish, arguments, a.T * a.N, max(1, NUMBERS_A_PIECE // a.V))
    keep((keys, decays, betas, outputs))
    return 0


@gated_delta.kernel(device="cpu", name="numba", preference=10, supports=declines_activations)
def gated_delta_numba(
    qkv_TC: Tensor, dt: Tensor, beta_TN: Tensor, gate_TM: Tensor, heads: DeltaHeads, state: Tensor, rows: StateRows
) -> Tensor:
    """See ``ops.gated_delta``. Raises ``IndexError`` when rows or slots do not fit the tensors."""
    T, G, N, K, V = len(qkv_TC), heads.num_key_heads, heads.num_heads, heads.key_dim, heads.value_dim
    num_decays = heads.dt_bias.numel() // N
    shapes = [list(x.shape[1:]) for x in (qkv_TC, dt, beta_TN, gate_TM, state)]
    if shapes != [[sum(heads.sizes)], [N * num_decays], [N], [N * V], [N, K, V]] or state.dtype not in FORMATS:
        heads_of = f"{G} key heads of {K}, {N} heads of {V}"
        raise ValueError(f"gated_delta: {heads_of}; columns and state {shapes}, {state.dtype}")
    qkv, dt, beta, gate = (rows_of(x.float()) for x in (qkv_TC, dt, beta_TN, gate_TM))
    statics = [x.float().contiguous() for x in (heads.a_log_N, heads.dt_bias, heads.norm_V)]
    out, rule = torch.empty(T, N * V), DELTA if num_decays == 1 else DELTA_BY_CHANNEL
    values = (
        *(*state_arguments(rows, T, state), recur_task(FORMATS[state.dtype], rule), N, K, V, *[0] * 10),
        *(num_decays, _prepare_task(), _finish_task(), *rows_at(qkv), G, *rows_at(dt), *rows_at(beta), *rows_at(gate)),
        *(*(x.data_ptr() for x in statics), heads.norm_eps, GATES[heads.gate], heads.beta_scale, heads.lowest),
        *(N // G if heads.is_tiled else 1, out.data_ptr()),
    )
    call(_driver(), ARGUMENTS, values, "gated_delta: rows or slots do not fit the tensors")
    return out
