"""Epilogue of a matrix product, on a tile of sixteen columns: bias, gated activation, residual, and the store."""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir

from octavo_kernels.cpu.compiled import emitted, inlined
from octavo_kernels.cpu.memory import view
from octavo_kernels.cpu.vector_ir import LANES, F32x16, Loop, call, constant, exp, fma, i64, load, offset, store

NO_GATE, SILU, GELU_TANH = 0, 1, 2
GATES = {None: NO_GATE, "silu": SILU, "gelu_tanh": GELU_TANH}
"""Activations supported by the kernels."""
TILE_BYTES = 4 * LANES

EPILOGUE = "bias residual out gate T N"
"""Fields that ``finish`` reads: addresses of float32, 0 for absent tensors; one of GATES; sizes."""


def gated(b: ir.IRBuilder, gate: ir.Value, x: ir.Value, up: ir.Value) -> ir.Value:
    """up * x / (1 + e^-z), where z is x for SiLU, and for GELU's tanh form the tanh's argument twice."""
    cubic = fma(b, b.fmul(x, constant(F32x16, 0.044715)), b.fmul(x, x), x)
    is_gelu = b.icmp_signed("==", gate, i64(GELU_TANH))
    z = b.select(is_gelu, b.fmul(cubic, constant(F32x16, 1.5957691216057308)), x)
    # e^-|z| cannot overflow: for negative z the quotient is taken times e^z above and below.
    e = exp(b, b.fneg(call(b, "llvm.fabs.v16f32", F32x16, [z])))
    one = constant(F32x16, 1.0)
    above = b.select(b.fcmp_ordered("<", z, constant(F32x16, 0.0)), e, one)
    return b.fmul(b.fdiv(b.fmul(x, above), b.fadd(one, e)), up)


@emitted()
def _finish_full(
    b: ir.IRBuilder, gate: ir.Value, sums: ir.Value, ups: ir.Value, bias: ir.Value, bias_up: ir.Value,
    residual: ir.Value, out: ir.Value, stride: ir.Value, num_tokens: ir.Value,
) -> None:  # fmt: skip
    """Tiles ``sums`` and ``ups`` to sixteen columns of ``out``, whose rows are ``stride`` bytes apart."""
    has_bias, has_gate, has_residual = (b.icmp_signed("!=", x, i64(0)) for x in (bias, gate, residual))
    with Loop(b, num_tokens, []) as loop:
        here, up = (offset(b, x, (loop.index, TILE_BYTES)) for x in (sums, ups))
        with b.if_then(has_bias):
            store(b, b.fadd(load(b, F32x16, here), load(b, F32x16, bias)), here)
        with b.if_then(has_gate):
            with b.if_then(has_bias):
                store(b, b.fadd(load(b, F32x16, up), load(b, F32x16, bias_up)), up)
            store(b, gated(b, gate, load(b, F32x16, here), load(b, F32x16, up)), here)
        row = b.mul(stride, loop.index)
        with b.if_then(has_residual):
            store(b, b.fadd(load(b, F32x16, here), load(b, F32x16, b.add(residual, row))), here)
        store(b, load(b, F32x16, here), b.add(out, row))


@inlined
def finish(a: Any, sums: int, ups: int, first: int, count: int, column: int) -> None:
    """Columns ``column ..`` of rows ``first ..`` of the output, from ``count`` rows of sums, and of ups if gated."""
    width = a.N // 2 if a.gate else a.N
    at = 4 * (first * width + column)
    if column + LANES <= width:
        bias = a.bias + 4 * column if a.bias else 0
        residual = a.residual + at if a.residual else 0
        places = sums, ups, bias, bias + 4 * width, residual, a.out + at
        _finish_full(a.gate, *places, 4 * width, count)
        return
    out, bias = view(a.out, a.T * width, np.float32), view(a.bias, a.N, np.float32)
    residual, rows = view(a.residual, a.T * width, np.float32), view(sums, count * LANES, np.float32)
    for t in range(count):
        for r in range(width - column):
            place = (first + t) * width + column + r
            y = rows[t * LANES + r]
            if a.bias:
                y += bias[column + r]
            if a.residual:
                y += residual[place]
            out[place] = y
