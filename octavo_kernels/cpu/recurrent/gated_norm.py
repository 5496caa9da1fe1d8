"""``gated_norm`` in float32, and its parts for other kernels."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from llvmlite import ir
from torch import Tensor

from octavo.ops.recurrent.gated_norm import Gate, gated_norm
from octavo_kernels.cpu.calls import call, task_driver
from octavo_kernels.cpu.compiled import emitted, inlined, task
from octavo_kernels.cpu.memory import fields, keep, read, view
from octavo_kernels.cpu.recurrent.recurrence import rows_of
from octavo_kernels.cpu.tensors import declines_activations, rows_at
from octavo_kernels.cpu.vector_ir import LANES, F32x16, Loop, constant, fma, i64, load, offset, sigmoid, store, sum_one

NUMBERS_A_PIECE = 4096
GATES: dict[Gate, int] = {"silu": 0, "sigmoid": 1}
ARGUMENTS = fields("task T piece x stride gate gate_stride weight out C width eps:float kind is_gated_first")


@emitted()
def squares(b: ir.IRBuilder, x: ir.Value, num_vectors: ir.Value, out: ir.Value) -> None:
    """The sum of squares of ``num_vectors`` vectors at an address, in sixteen parts that are added in a fixed order."""
    with Loop(b, num_vectors, [constant(F32x16, 0.0)]) as loop:
        number = load(b, F32x16, offset(b, x, (loop.index, 4 * LANES)))
        loop.carried = [fma(b, number, number, loop.carried[0])]
    store(b, sum_one(b, loop.results[0]), out)


@emitted()
def _multiply(
    b: ir.IRBuilder, x: ir.Value, gate: ir.Value, out: ir.Value, num_vectors: ir.Value, kind: ir.Value
) -> None:
    """``x * act(gate)`` over ``num_vectors`` vectors at three addresses; ``kind`` is one of GATES."""
    is_silu = b.icmp_signed("==", kind, i64(GATES["silu"]))
    with Loop(b, num_vectors, []) as loop:
        places = [offset(b, address, (loop.index, 4 * LANES)) for address in (x, gate, out)]
        number, z = load(b, F32x16, places[0]), load(b, F32x16, places[1])
        factor = b.select(is_silu, z, constant(F32x16, 1.0))
        store(b, b.fmul(sigmoid(b, z), b.fmul(factor, number)), places[2])


@inlined
def normalise_group(
    x_at: int, gate_at: int, weight_at: int, out_at: int, width: int, eps: float, kind: int, first: int, padded: Any
) -> None:
    """One group of ``width`` numbers; ``padded`` is scratch, float32 [2, width rounded up to 16], zeros behind it."""
    x, gate, vectors = view(x_at, width, np.float32), view(gate_at, width, np.float32), (width + LANES - 1) // LANES
    weight, out = view(weight_at, width, np.float32), view(out_at, width, np.float32)
    numbers, gates, total = padded[0], padded[1], np.empty(1, np.float32)
    for i in range(width):
        numbers[i], gates[i] = x[i], gate[i]
    if first:
        _multiply(numbers.ctypes.data, gates.ctypes.data, numbers.ctypes.data, vectors, kind)
    squares(numbers.ctypes.data, vectors, total.ctypes.data)
    scale = np.float32(1) / np.sqrt(total[0] / np.float32(width) + np.float32(eps))
    for i in range(width):
        numbers[i] = numbers[i] * scale * weight[i]
    if not first:
        _multiply(numbers.ctypes.data, gates.ctypes.data, numbers.ctypes.data, vectors, kind)
    for i in range(width):
        out[i] = numbers[i]


@task
def _task(arguments: int, begin: int, end: int) -> None:
    """Task over rows."""
    a = read(arguments, ARGUMENTS)
    padded = np.zeros((2, (a.width + LANES - 1) // LANES * LANES), np.float32)
    for t in range(begin, end):
        for at in range(0, 4 * a.C, 4 * a.width):
            x, gate, out = a.x + t * a.stride + at, a.gate + t * a.gate_stride + at, a.out + 4 * t * a.C + at
            normalise_group(x, gate, a.weight + at, out, a.width, a.eps, a.kind, a.is_gated_first, padded)
    keep(padded)


@gated_norm.kernel(device="cpu", name="numba", preference=10, supports=declines_activations)
def gated_norm_numba(
    x_TC: Tensor, gate_TC: Tensor, weight_C: Tensor, eps: float, width: int, gate: Gate, *, is_gated_first: bool
) -> Tensor:
    """See ``ops.gated_norm``."""
    x, gates, weight = rows_of(x_TC), rows_of(gate_TC.float()), weight_C.float().contiguous()
    T, C = x_TC.shape
    if gates.shape != x.shape or len(weight) != C or C % width:
        shapes = f"x {list(x.shape)}, gate {list(gates.shape)}, {len(weight)} weights, width {width}"
        raise ValueError(f"gated_norm: {shapes}")
    out_TC = torch.empty(T, C)
    values = (
        *(_task(), T, max(1, NUMBERS_A_PIECE // C), *rows_at(x), *rows_at(gates)),
        *(weight.data_ptr(), out_TC.data_ptr(), C, width, eps, GATES[gate], is_gated_first),
    )
    call(task_driver(), ARGUMENTS, values)
    return out_TC
