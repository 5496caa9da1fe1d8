"""``gelu`` in float32, sixteen lanes at a time."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import types
from torch import Tensor

from octavo.ops.activation import gelu
from octavo_kernels.cpu import vector_ir
from octavo_kernels.cpu.calls import call
from octavo_kernels.cpu.compiled import compiled_task, emitted, rarely_used
from octavo_kernels.cpu.linear.epilogue import GELU_TANH, gated
from octavo_kernels.cpu.memory import fields, read
from octavo_kernels.cpu.task_driver import task_driver
from octavo_kernels.cpu.tensors import declines_floats, whole_vectors
from octavo_kernels.cpu.vector_ir import LANES, F32x16, Loop, constant, exp, fma, i64, load, offset, store

NUMBERS_A_PIECE = 8192
ARGUMENTS = fields("task T piece x out width approximate")
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


@emitted
def _activate(context: Any, approximate: Any, x: Any, out: Any, num_vectors: Any) -> Any:
    """GELU of ``num_vectors`` vectors at ``x`` to ``out``, or its tanh form."""

    def emit(c: Any, b: ir.IRBuilder, _s: Any, args: Any) -> ir.Value:
        approximate, x, out, num_vectors = args
        with b.if_else(b.icmp_signed("!=", approximate, i64(0))) as branches:
            for branch, is_tanh in zip(branches, (True, False), strict=True):
                with branch, Loop(b, num_vectors, []) as loop:
                    here, there = (offset(b, at, (loop.index, 4 * LANES)) for at in (x, out))
                    numbers = load(b, F32x16, here)
                    tanh = gated(b, i64(GELU_TANH), numbers, constant(F32x16, 1.0)) if is_tanh else None
                    store(b, _gelu(b, numbers) if tanh is None else tanh, there)
        return c.get_dummy_value()

    return types.void(*([types.intp] * 4)), emit


@rarely_used
def _task() -> int:
    """Task over rows."""

    def activate(arguments: int, begin: int, end: int) -> None:
        a = read(arguments, ARGUMENTS)
        at = 4 * a.width * begin
        _activate(a.approximate, a.x + at, a.out + at, (end - begin) * (a.width // LANES))

    return compiled_task(activate)


@gelu.kernel(device="cpu", name="numba", preference=10, supports=declines_floats)
def gelu_numba(x_TF: Tensor, approximate: bool) -> Tensor:
    """See ``ops.gelu``; ``x`` may have any axes."""
    x = whole_vectors(x_TF.float())
    F, width = x_TF.shape[-1], x.shape[-1]
    out = torch.empty(x.shape)
    arguments = np.empty(1, ARGUMENTS)
    T, piece = x.numel() // max(1, width), max(1, NUMBERS_A_PIECE // max(1, width))
    arguments[0] = (_task(), T, piece, x.data_ptr(), out.data_ptr(), width, approximate)
    call(task_driver(), arguments)
    return (out if width == F else out[..., :F]).to(x_TF.dtype)
