"""The activations of ``ops/activation.py`` in float32, sixteen lanes at a time."""

from __future__ import annotations

import numpy as np
import torch
from llvmlite import ir
from numba import types
from torch import Tensor

from octavo.ops.activation import clamped_swish, gelu, silu_and_mul, squared_relu
from octavo_kernels.cpu import vector_ir
from octavo_kernels.cpu.calls import call, task_driver
from octavo_kernels.cpu.compiled import emitted, rarely_used, task
from octavo_kernels.cpu.linear.epilogue import GELU_TANH, SILU, gated
from octavo_kernels.cpu.memory import fields, read, view
from octavo_kernels.cpu.tensors import declines_floats, whole_vectors
from octavo_kernels.cpu.vector_ir import (
    LANES,
    F32x16,
    Loop,
    constant,
    exp,
    fma,
    i64,
    load,
    offset,
    sigmoid,
    splat,
    store,
)

NUMBERS_A_PIECE = 8192
GELU_ARGUMENTS = fields("task T piece x out width approximate")
GATED_ARGUMENTS = fields("task T piece gate_up out width alpha:float limit:float")
"""The last two are those of ``clamped_swish``."""
SQUARED_ARGUMENTS = fields("task T piece x out width")
TAIL = (
    *(0.17087277, -0.82215223, 1.48851587, -1.13520398, 0.27886807),
    *(-0.18628806, 0.09678418, 0.37409196, 1.00002368, -1.26551223),
)
"""Of the polynomial in ``_gelu``, from the highest power on."""


def _gelu(b: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """x * Phi(x) per lane, where Phi(-|x|) = erfc(z) / 2 with z = |x| / sqrt(2).

    erfc(z) = t * e ** (p(t) - z * z) with t = 1 / (1 + z / 2), to 1.2e-7 of itself: Press, Teukolsky, Vetterling and
    Flannery, Numerical Recipes in C, second edition, 1992, section 6.2.
    """
    z = b.fmul(vector_ir.call(b, "llvm.fabs.v16f32", F32x16, [x]), constant(F32x16, 0.7071067811865476))
    t = b.fdiv(constant(F32x16, 1.0), fma(b, z, constant(F32x16, 0.5), constant(F32x16, 1.0)))
    series = constant(F32x16, TAIL[0])
    for factor in TAIL[1:]:
        series = fma(b, series, t, constant(F32x16, factor))
    below = b.fmul(b.fmul(t, constant(F32x16, 0.5)), exp(b, fma(b, b.fneg(z), z, series)))
    above = b.fsub(constant(F32x16, 1.0), below)
    return b.fmul(x, b.select(b.fcmp_ordered("<", x, constant(F32x16, 0.0)), below, above))


@emitted()
def _activate(b: ir.IRBuilder, approximate: ir.Value, x: ir.Value, out: ir.Value, num_vectors: ir.Value) -> None:
    """GELU of ``num_vectors`` vectors at ``x`` to ``out``, or its tanh form."""
    with b.if_else(b.icmp_signed("!=", approximate, i64(0))) as branches:
        for branch, is_tanh in zip(branches, (True, False), strict=True):
            with branch, Loop(b, num_vectors, []) as loop:
                here, there = (offset(b, at, (loop.index, 4 * LANES)) for at in (x, out))
                numbers = load(b, F32x16, here)
                tanh = gated(b, i64(GELU_TANH), numbers, constant(F32x16, 1.0)) if is_tanh else None
                store(b, _gelu(b, numbers) if tanh is None else tanh, there)


@rarely_used
@task
def _gelu_task(arguments: int, begin: int, end: int) -> None:
    """Task over rows."""
    a = read(arguments, GELU_ARGUMENTS)
    at = 4 * a.width * begin
    _activate(a.approximate, a.x + at, a.out + at, (end - begin) * (a.width // LANES))


@gelu.kernel(device="cpu", name="numba", preference=10, supports=declines_floats)
def gelu_numba(x_TF: Tensor, approximate: bool) -> Tensor:
    """See ``ops.gelu``; ``x`` may have any axes."""
    x = whole_vectors(x_TF.float())
    F, width = x_TF.shape[-1], x.shape[-1]
    out = torch.empty(x.shape)
    T, piece = x.numel() // max(1, width), max(1, NUMBERS_A_PIECE // max(1, width))
    call(task_driver(), GELU_ARGUMENTS, (_gelu_task(), T, piece, x.data_ptr(), out.data_ptr(), width, approximate))
    return (out if width == F else out[..., :F]).to(x_TF.dtype)


@emitted()
def _gate(b: ir.IRBuilder, gate: ir.Value, up: ir.Value, out: ir.Value, num_vectors: ir.Value) -> None:
    """out = silu(gate) * up over ``num_vectors`` vectors at three addresses."""
    with Loop(b, num_vectors, []) as loop:
        at = [offset(b, address, (loop.index, 4 * LANES)) for address in (gate, up, out)]
        store(b, gated(b, i64(SILU), load(b, F32x16, at[0]), load(b, F32x16, at[1])), at[2])


@rarely_used
@task
def _silu_task(arguments: int, begin: int, end: int) -> None:
    """Task over rows."""
    a = read(arguments, GATED_ARGUMENTS)
    row_bytes = 4 * a.width
    for t in range(begin, end):
        gate = a.gate_up + 2 * row_bytes * t
        _gate(gate, gate + row_bytes, a.out + row_bytes * t, a.width // LANES)


@silu_and_mul.kernel(device="cpu", name="numba", preference=10, supports=declines_floats)
def silu_and_mul_numba(gate_up_T2F: Tensor) -> Tensor:
    """See ``ops.silu_and_mul``."""
    return _gated(_silu_task(), gate_up_T2F, 0.0, 0.0)


def _gated(task_at: int, gate_up_T2F: Tensor, alpha: float, limit: float) -> Tensor:
    T, F = gate_up_T2F.shape[0], gate_up_T2F.shape[1] // 2
    gate_up = whole_vectors(gate_up_T2F.float().view(T, 2, F))
    width = gate_up.shape[2]
    out = torch.empty(T, width)
    piece = max(1, NUMBERS_A_PIECE // width)
    call(task_driver(), GATED_ARGUMENTS, (task_at, T, piece, gate_up.data_ptr(), out.data_ptr(), width, alpha, limit))
    return out[:, :F].to(gate_up_T2F.dtype)


@emitted(alpha=types.float32, limit=types.float32)
def _clamp(
    b: ir.IRBuilder, gate: ir.Value, up: ir.Value, out: ir.Value, num_vectors: ir.Value, alpha: ir.Value,
    limit: ir.Value,
) -> None:  # fmt: skip
    """out = gate * sigmoid(alpha * gate) * (up + 1) of clamped gates and ups, at three addresses."""
    most, factor, one = splat(b, limit), splat(b, alpha), constant(F32x16, 1.0)
    least = b.fneg(most)
    with Loop(b, num_vectors, []) as loop:
        at = [offset(b, address, (loop.index, 4 * LANES)) for address in (gate, up, out)]
        x, y = (load(b, F32x16, place) for place in at[:2])
        x, y = (b.select(b.fcmp_ordered(">", value, most), most, value) for value in (x, y))
        y = b.select(b.fcmp_ordered("<", y, least), least, y)
        store(b, b.fmul(b.fmul(x, sigmoid(b, b.fmul(x, factor))), b.fadd(y, one)), at[2])


@rarely_used
@task
def _clamped_task(arguments: int, begin: int, end: int) -> None:
    """Task over rows."""
    a = read(arguments, GATED_ARGUMENTS)
    alpha, limit, row_bytes = np.float32(a.alpha), np.float32(a.limit), 4 * a.width
    for t in range(begin, end):
        gate = a.gate_up + 2 * row_bytes * t
        _clamp(gate, gate + row_bytes, a.out + row_bytes * t, a.width // LANES, alpha, limit)


@clamped_swish.kernel(device="cpu", name="numba", preference=10, supports=declines_floats)
def clamped_swish_numba(gate_up_T2F: Tensor, alpha: float, limit: float) -> Tensor:
    """See ``ops.clamped_swish``."""
    return _gated(_clamped_task(), gate_up_T2F, alpha, limit)


@rarely_used
@task
def _squared_task(arguments: int, begin: int, end: int) -> None:
    """Task over rows."""
    a = read(arguments, SQUARED_ARGUMENTS)
    size = (end - begin) * a.width
    x, out = view(a.x + 4 * begin * a.width, size, np.float32), view(a.out + 4 * begin * a.width, size, np.float32)
    for i in range(size):
        positive = np.float32(0) if x[i] < 0 else x[i]
        out[i] = positive * positive


@squared_relu.kernel(device="cpu", name="numba", preference=10, supports=declines_floats)
def squared_relu_numba(x_TF: Tensor) -> Tensor:
    """See ``ops.squared_relu``."""
    (T, F), x = x_TF.shape, x_TF.float().contiguous()
    out = torch.empty(T, F)
    values = (_squared_task(), T, max(1, NUMBERS_A_PIECE // max(1, F)), x.data_ptr(), out.data_ptr(), F)
    call(task_driver(), SQUARED_ARGUMENTS, values)
    return out.to(x_TF.dtype)
