"""``silu_and_mul`` in float32, sixteen lanes at a time."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import types
from torch import Tensor

from octavo.ops.cpu.compiled import compiled, compiled_task, emitted
from octavo.ops.cpu.memory import fields, keep, read
from octavo.ops.cpu.tensors import declines_floats, whole_vectors
from octavo.ops.cpu.threads import pool_address, run
from octavo.ops.cpu.vector_ir import LANES, F32x16, Loop, call, constant, exp, load, offset, store
from octavo.ops.silu_and_mul import silu_and_mul

NUMBERS_A_CHUNK = 8192
ARGUMENTS = fields(gate_up=int, out=int, width=int)


@emitted
def _gate(context: Any, gate: Any, up: Any, out: Any, num_vectors: Any) -> Any:
    """out = silu(gate) * up over ``num_vectors`` vectors at three addresses."""

    def emit(c: Any, b: ir.IRBuilder, _s: Any, args: Any) -> ir.Value:
        gate, up, out, num_vectors = args
        with Loop(b, num_vectors, []) as loop:
            at = [offset(b, address, (loop.index, 4 * LANES)) for address in (gate, up, out)]
            g = load(b, F32x16, at[0])
            # x / (1 + e^-x), with e^-|x|, which cannot overflow: for negative x, times e^x above and below.
            e = exp(b, b.fneg(call(b, "llvm.fabs.v16f32", F32x16, [g])))
            one = constant(F32x16, 1.0)
            above = b.select(b.fcmp_ordered("<", g, constant(F32x16, 0.0)), e, one)
            store(b, b.fmul(b.fdiv(b.fmul(g, above), b.fadd(one, e)), load(b, F32x16, at[1])), at[2])
        return c.get_dummy_value()

    return types.void(*([types.intp] * 4)), emit


@functools.cache
def _task() -> int:
    """Task over rows."""

    def gate_rows(arguments: int, begin: int, end: int) -> None:
        a = read(arguments, ARGUMENTS)
        row_bytes = 4 * a.width
        for t in range(begin, end):
            gate = a.gate_up + 2 * row_bytes * t
            _gate(gate, gate + row_bytes, a.out + row_bytes * t, a.width // LANES)

    return compiled_task(gate_rows)


@compiled
def _gate_all(pool: int, task: int, gate_up: int, out: int, T: int, F: int) -> None:
    arguments = np.empty(1, ARGUMENTS)
    a = arguments[0]
    a.gate_up, a.out, a.width = gate_up, out, F
    run(pool, task, arguments.ctypes.data, T, max(1, NUMBERS_A_CHUNK // F))
    keep(arguments)


@silu_and_mul.kernel(device="cpu", name="numba", preference=10, supports=declines_floats)
def silu_and_mul_numba(gate_up_T2F: Tensor) -> Tensor:
    """See ``ops.silu_and_mul``."""
    T, F = gate_up_T2F.shape[0], gate_up_T2F.shape[1] // 2
    gate_up = whole_vectors(gate_up_T2F.float().view(T, 2, F))
    x = torch.empty(T, gate_up.shape[2])
    _gate_all(pool_address(), _task(), gate_up.data_ptr(), x.data_ptr(), T, gate_up.shape[2])
    return x[:, :F].to(gate_up_T2F.dtype)
