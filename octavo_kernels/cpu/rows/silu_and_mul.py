"""``silu_and_mul`` in float32, sixteen lanes at a time."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import types
from torch import Tensor

from octavo.ops.activation import silu_and_mul
from octavo_kernels.cpu.calls import call
from octavo_kernels.cpu.compiled import compiled_task, emitted, rarely_used
from octavo_kernels.cpu.linear.epilogue import SILU, gated
from octavo_kernels.cpu.memory import fields, read
from octavo_kernels.cpu.task_driver import task_driver
from octavo_kernels.cpu.tensors import declines_floats, whole_vectors
from octavo_kernels.cpu.vector_ir import LANES, F32x16, Loop, i64, load, offset, store

NUMBERS_A_PIECE = 8192
ARGUMENTS = fields("task T piece gate_up out width")


@emitted
def _gate(context: Any, gate: Any, up: Any, out: Any, num_vectors: Any) -> Any:
    """out = silu(gate) * up over ``num_vectors`` vectors at three addresses."""

    def emit(c: Any, b: ir.IRBuilder, _s: Any, args: Any) -> ir.Value:
        gate, up, out, num_vectors = args
        with Loop(b, num_vectors, []) as loop:
            at = [offset(b, address, (loop.index, 4 * LANES)) for address in (gate, up, out)]
            store(b, gated(b, i64(SILU), load(b, F32x16, at[0]), load(b, F32x16, at[1])), at[2])
        return c.get_dummy_value()

    return types.void(*([types.intp] * 4)), emit


@rarely_used
def _task() -> int:
    """Task over rows."""

    def gate_rows(arguments: int, begin: int, end: int) -> None:
        a = read(arguments, ARGUMENTS)
        row_bytes = 4 * a.width
        for t in range(begin, end):
            gate = a.gate_up + 2 * row_bytes * t
            _gate(gate, gate + row_bytes, a.out + row_bytes * t, a.width // LANES)

    return compiled_task(gate_rows)


@silu_and_mul.kernel(device="cpu", name="numba", preference=10, supports=declines_floats)
def silu_and_mul_numba(gate_up_T2F: Tensor) -> Tensor:
    """See ``ops.silu_and_mul``."""
    T, F = gate_up_T2F.shape[0], gate_up_T2F.shape[1] // 2
    gate_up = whole_vectors(gate_up_T2F.float().view(T, 2, F))
    width = gate_up.shape[2]
    out = torch.empty(T, width)
    arguments = np.empty(1, ARGUMENTS)
    arguments[0] = (_task(), T, max(1, NUMBERS_A_PIECE // width), gate_up.data_ptr(), out.data_ptr(), width)
    call(task_driver(), arguments)
    return out[:, :F].to(gate_up_T2F.dtype)
