"""``gated_norm`` in float32, and its parts for other kernels."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import types
from torch import Tensor

from octavo.ops.gated_norm import Gate, gated_norm
from octavo_kernels.cpu.calls import call
from octavo_kernels.cpu.compiled import compiled_task, emitted, inlined
from octavo_kernels.cpu.memory import fields, keep, read, view
from octavo_kernels.cpu.recurrent.recurrence import rows_of
from octavo_kernels.cpu.task_driver import task_driver
from octavo_kernels.cpu.tensors import declines_activations
from octavo_kernels.cpu.vector_ir import LANES, F32x16, Loop, constant, fma, i64, load, offset, sigmoid, store, sum_one

NUMBERS_A_PIECE = 4096
GATES: dict[Gate, int] = {"silu": 0, "sigmoid": 1}
ARGUMENTS = fields("task T piece x stride gate gate_stride weight out C width eps:float kind is_gated_first")


@emitted
def squares(context: Any, x: Any, num_vectors: Any, out: Any) -> Any:
    """The sum of squares of ``num_vectors`` vectors at an address, in sixteen parts that are added in a fixed order."""

    def emit(c: Any, b: ir.IRBuilder, _s: Any, args: Any) -> ir.Value:
        x, num_vectors, out = args
        with Loop(b, num_vectors, [constant(F32x16, 0.0)]) as loop:
            number = load(b, F32x16, offset(b, x, (loop.index, 4 * LANES)))
            loop.carried = [fma(b, number, number, loop.carried[0])]
        store(b, sum_one(b, loop.results[0]), out)
        return c.get_dummy_value()

    return types.void(*([types.intp] * 3)), emit


@emitted
def _multiply(context: Any, x: Any, gate: Any, out: Any, num_vectors: Any, kind: Any) -> Any:
    """``x * act(gate)`` over ``num_vectors`` vectors at three addresses; ``kind`` is one of GATES."""

    def emit(c: Any, b: ir.IRBuilder, _s: Any, args: Any) -> ir.Value:
        x, gate, out, num_vectors, kind = args
        is_silu = b.icmp_signed("==", kind, i64(GATES["silu"]))
        with Loop(b, num_vectors, []) as loop:
            places = [offset(b, address, (loop.index, 4 * LANES)) for address in (x, gate, out)]
            number, z = load(b, F32x16, places[0]), load(b, F32x16, places[1])
            factor = b.select(is_silu, z, constant(F32x16, 1.0))
            store(b, b.fmul(sigmoid(b, z), b.fmul(factor, number)), places[2])
        return c.get_dummy_value()

    return types.void(*([types.intp] * 5)), emit


@inlined
def normalise_group(
    x_at: int, gate_at: int, weight_at: int, out_at: int, width: int, eps: float, kind: int, first: int, padded: Any
) -> None:
    """One group of ``width`` numbers; ``padded`` is scratch, float32 [2, width rounded up to 16], zeros behind it."""
    x, gate, weight = (
        view(x_at, width, np.float32),
        view(gate_at, width, np.float32),
        view(weight_at, width, np.float32),
    )
    out, vectors = view(out_at, width, np.float32), (width + LANES - 1) // LANES
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


@functools.cache
def _task() -> int:
    """Task over rows."""

    def normalise(arguments: int, begin: int, end: int) -> None:
        a = read(arguments, ARGUMENTS)
        padded = np.zeros((2, (a.width + LANES - 1) // LANES * LANES), np.float32)
        for t in range(begin, end):
            for at in range(0, 4 * a.C, 4 * a.width):
                x, gate, out = a.x + t * a.stride + at, a.gate + t * a.gate_stride + at, a.out + 4 * t * a.C + at
                normalise_group(x, gate, a.weight + at, out, a.width, a.eps, a.kind, a.is_gated_first, padded)
        keep(padded)

    return compiled_task(normalise)


@gated_norm.kernel(device="cpu", name="numba", preference=10, supports=declines_activations)
def gated_norm_numba(
    x_TC: Tensor, gate_TC: Tensor, weight_C: Tensor, eps: float, width: int, gate: Gate, *, is_gated_first: bool
) -> Tensor:
    """See ``ops.gated_norm``."""
    x, gates, weight = rows_of(x_TC), rows_of(gate_TC.float()), weight_C.float().contiguous()
    T, C = x_TC.shape
    if gates.shape != x.shape or len(weight) != C or C % width:
        raise ValueError(
            f"gated_norm: x {list(x.shape)}, gate {list(gates.shape)}, {len(weight)} weights, width {width}"
        )
    out_TC = torch.empty(T, C)
    arguments = np.empty(1, ARGUMENTS)
    arguments[0] = (
        *(
            _task(),
            T,
            max(1, NUMBERS_A_PIECE // C),
            x.data_ptr(),
            4 * x.stride(0),
            gates.data_ptr(),
            4 * gates.stride(0),
        ),
        *(weight.data_ptr(), out_TC.data_ptr(), C, width, eps, GATES[gate], is_gated_first),
    )
    call(task_driver(), arguments)
    return out_TC
