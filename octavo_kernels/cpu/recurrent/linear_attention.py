"""``linear_attention`` in one call: the activation by rows, then the recurrence by blocks of columns."""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
from llvmlite import ir
from torch import Tensor

from octavo.ops.recurrent.linear_attention import linear_attention
from octavo.ops.recurrent.recurrence import StateRows
from octavo_kernels.cpu.calls import call
from octavo_kernels.cpu.compiled import driver, emitted, task
from octavo_kernels.cpu.linear.epilogue import NO_GATE, SILU, gated
from octavo_kernels.cpu.memory import fields, keep, read, view
from octavo_kernels.cpu.recurrent.recurrence import PLAIN, STATE, fits, recur_all, recur_task, state_arguments
from octavo_kernels.cpu.tensors import FORMATS, declines_activations, whole_vectors
from octavo_kernels.cpu.threads import run
from octavo_kernels.cpu.vector_ir import LANES, F32x16, Loop, constant, i64, load, offset, store

NUMBERS_A_PIECE = 8192
ARGUMENTS = fields(STATE, "prepare qkv width rates activation")


@emitted()
def _activate(b: ir.IRBuilder, x: ir.Value, out: ir.Value, num_vectors: ir.Value, activation: ir.Value) -> None:
    """act(x) of ``num_vectors`` vectors from one address to another."""
    is_gated = b.icmp_signed("==", activation, i64(SILU))
    with Loop(b, num_vectors, []) as loop:
        number = load(b, F32x16, offset(b, x, (loop.index, 4 * LANES)))
        acted = gated(b, i64(SILU), number, constant(F32x16, 1.0))
        store(b, b.select(is_gated, acted, number), offset(b, out, (loop.index, 4 * LANES)))


@task
def _prepare_task(arguments: int, begin: int, end: int) -> None:
    """Task over rows."""
    a = read(arguments, ARGUMENTS)
    rates = view(a.rates, a.N, np.float32)
    for t in range(begin, end):
        _activate(a.qkv + 4 * t * a.width, a.q + 4 * t * a.width, a.width // LANES, a.activation)
        decays = view(a.decay + 4 * t * a.N, a.N, np.float32)
        for n in range(a.N):
            decays[n] = rates[n]


@driver
def _driver(pool: int, arguments: int) -> int:
    a = read(arguments, ARGUMENTS)
    if not fits(a):
        return 1
    decays, numbers = np.empty(a.T * a.N, np.float32), np.empty(a.T * a.width, np.float32)
    a.decay, a.q = decays.ctypes.data, numbers.ctypes.data
    a.k = a.q + 4 * a.N * a.K
    a.v = a.k + 4 * a.N * a.K
    run(pool, a.prepare, arguments, a.T, max(1, NUMBERS_A_PIECE // a.width))
    recur_all(pool, arguments)
    keep((decays, numbers))
    return 0


@linear_attention.kernel(device="cpu", name="numba", preference=10, supports=declines_activations)
def linear_attention_numba(
    qkv_TC: Tensor, decay_N: Tensor, state: Tensor, rows: StateRows, activation: Literal["silu"] | None = None
) -> Tensor:
    """See ``ops.linear_attention``. Raises ``IndexError`` when rows or slots do not fit the tensors."""
    (T, C), N = qkv_TC.shape, len(decay_N)
    H = C // (3 * N)
    if C != 3 * N * H or state.shape[1:] != (N, H, H) or state.dtype not in FORMATS:
        raise ValueError(f"linear_attention: {N} heads, {C} columns, state {list(state.shape)} of {state.dtype}")
    qkv, decay = whole_vectors(qkv_TC), decay_N.float().contiguous()
    width, out = qkv.shape[1], torch.empty(T, N * H)
    values = (
        *(*state_arguments(rows, T, state), recur_task(FORMATS[state.dtype], PLAIN), N, H, H),
        *(0, 0, 4 * width, 1, 0, 4 * width, 0, 0, 0, out.data_ptr()),
        *(_prepare_task(), qkv.data_ptr(), width, decay.data_ptr(), SILU if activation else NO_GATE),
    )
    call(_driver(), ARGUMENTS, values, "linear_attention: rows or slots do not fit the tensors")
    return out
