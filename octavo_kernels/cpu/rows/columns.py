"""Columns side by side."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from octavo.ops.activation import add_scaled, scaled, sigmoid_and_mul
from octavo.ops.linear.linear import concat, put_columns
from octavo_kernels.cpu.calls import call, task_driver
from octavo_kernels.cpu.compiled import driver, rarely_used, task
from octavo_kernels.cpu.memory import fields, read, view
from octavo_kernels.cpu.tensors import address, declines_floats, rows_at

# ---- put_columns: ``put_columns`` in float32, as a call that can be recorded.


ARGUMENTS = fields("part stride bias out T M N")


def declines(dtype: torch.dtype) -> str | None:
    """Why a kernel that moves float32 numbers cannot take ``dtype`` here; ``None`` if it can."""
    return declines_floats(dtype) or (None if dtype == torch.float32 else f"takes float32, not {dtype}")


@rarely_used
@driver
def _driver(pool: int, arguments: int) -> int:
    a = read(arguments, ARGUMENTS)
    for t in range(a.T):
        part = view(a.part + t * a.stride, a.M, np.float32)
        out = view(a.out + 4 * t * a.N, a.M, np.float32)
        if a.bias == 0:
            out[:] = part
        else:
            out[:] = part + view(a.bias, a.M, np.float32)
    return 0


@put_columns.kernel(device="cpu", name="numba", preference=10, supports=declines)
def put_columns_numba(part_TM: Tensor, out_TN: Tensor, start: int, bias_N: Tensor | None = None) -> None:
    """See ``ops.put_columns``; a bias may have any float dtype, and the part may be some columns of a wider tensor."""
    (T, M), N = part_TM.shape, out_TN.shape[1]
    assert out_TN.dtype == torch.float32, f"the whole is {out_TN.dtype}, the part float32"
    assert out_TN.is_contiguous(), "the rows of the whole must follow one another"
    assert 0 <= start <= N - M, f"{M} columns from {start} on are not among {N}"
    part_TM = part_TM if part_TM.stride(1) == 1 else part_TM.contiguous()
    bias = None if bias_N is None else bias_N[start : start + M].float().contiguous()
    at = 0 if bias is None else bias.data_ptr()
    call(_driver(), ARGUMENTS, (*rows_at(part_TM), at, out_TN.data_ptr() + 4 * start, T, M, N))


# ---- concat: ``concat`` in float32, as calls that can be recorded.


@concat.kernel(device="cpu", name="numba", preference=10, supports=declines)
def concat_numba(first_TM: Tensor, *others: Tensor) -> Tensor:
    """See ``ops.concat``."""
    parts = (first_TM, *others)
    out_TN = torch.empty(len(first_TM), sum(part.shape[1] for part in parts))
    start = 0
    for part in parts:
        put_columns_numba(part, out_TN, start)
        start += part.shape[1]
    return out_TN


# ---- sigmoid_and_mul, add_scaled: in float32, as calls that can be recorded.


GATE = fields("gate stride is_column x addend out T N")
"""The gate may be a column, and there may be nothing to add."""


@rarely_used
@driver
def _gate_driver(pool: int, arguments: int) -> int:
    a = read(arguments, GATE)
    one = np.float32(1)
    for t in range(a.T):
        gate = view(a.gate + t * a.stride, 1 if a.is_column else a.N, np.float32)
        x = view(a.x + 4 * t * a.N, a.N, np.float32)
        out = view(a.out + 4 * t * a.N, a.N, np.float32)
        if a.is_column:
            share = one / (one + np.exp(-gate[0]))
            for i in range(a.N):
                out[i] = x[i] * share
        else:
            for i in range(a.N):
                out[i] = x[i] / (one + np.exp(-gate[i]))
        if a.addend:
            addend = view(a.addend + 4 * t * a.N, a.N, np.float32)
            for i in range(a.N):
                out[i] += addend[i]
    return 0


@sigmoid_and_mul.kernel(device="cpu", name="numba", preference=10, supports=declines)
def sigmoid_and_mul_numba(gate_TN: Tensor, x_TN: Tensor) -> Tensor:
    """See ``ops.sigmoid_and_mul``."""
    gate_TN = gate_TN if gate_TN.stride(1) == 1 else gate_TN.contiguous()
    assert gate_TN.shape == x_TN.shape, f"a gate for {list(gate_TN.shape)}, x is {list(x_TN.shape)}"
    return _gated(gate_TN, 0, x_TN.contiguous(), None)


@add_scaled.kernel(device="cpu", name="numba", preference=10, supports=declines)
def add_scaled_numba(x_TN: Tensor, factor: float | Tensor, residual_TN: Tensor) -> Tensor:
    """See ``ops.add_scaled``."""
    if not isinstance(factor, Tensor):
        return scaled_numba(x_TN, factor, residual_TN)
    assert factor.shape == (len(x_TN), 1), f"gates for {list(factor.shape)}, x is {list(x_TN.shape)}"
    assert residual_TN.shape == x_TN.shape, f"the residual is {list(residual_TN.shape)}, x {list(x_TN.shape)}"
    assert residual_TN.dtype == torch.float32, f"the residual is {residual_TN.dtype}, x float32"
    return _gated(factor.contiguous(), 1, x_TN.contiguous(), residual_TN.contiguous())


def _gated(gate: Tensor, is_column: int, x_TN: Tensor, addend_TN: Tensor | None) -> Tensor:
    assert gate.dtype == torch.float32, f"the gate is {gate.dtype}, x float32"
    out_TN = torch.empty(x_TN.shape)
    places = *rows_at(gate), is_column, x_TN.data_ptr(), address(addend_TN), out_TN.data_ptr()
    call(_gate_driver(), GATE, (*places, *x_TN.shape))
    return out_TN


# ---- scaled: ``scaled`` in float32, as a call that can be recorded.


SCALE = fields("task T piece x stride factors addend out N factor:float")
NUMBERS_A_PIECE = 32_768


@rarely_used
@task
def _scale_task(arguments: int, begin: int, end: int) -> None:
    """Task over rows."""
    a = read(arguments, SCALE)
    single = np.float32(a.factor)
    for t in range(begin, end):
        x, out = view(a.x + t * a.stride, a.N, np.float32), view(a.out + 4 * t * a.N, a.N, np.float32)
        if a.factors == 0:
            for i in range(a.N):
                out[i] = x[i] * single
        else:
            factors = view(a.factors, a.N, np.float32)
            for i in range(a.N):
                out[i] = x[i] * factors[i]
        if a.addend != 0:
            addend = view(a.addend + 4 * t * a.N, a.N, np.float32)
            for i in range(a.N):
                out[i] += addend[i]


@scaled.kernel(device="cpu", name="numba", preference=10, supports=declines)
def scaled_numba(x_TN: Tensor, factor: float | Tensor, addend_TN: Tensor | None = None) -> Tensor:
    """See ``ops.scaled``."""
    x_TN = x_TN if x_TN.stride(1) == 1 else x_TN.contiguous()
    addend = None if addend_TN is None else addend_TN.contiguous()
    T, N = x_TN.shape
    assert addend is None or (addend.shape, addend.dtype) == (x_TN.shape, torch.float32), "what is added does not fit x"
    factors = factor.float().contiguous() if isinstance(factor, Tensor) else None
    assert factors is None or factors.shape == (N,), f"factors for {N} columns"
    out_TN = torch.empty(T, N)
    addresses = (0 if part is None else part.data_ptr() for part in (factors, addend))
    single = 1.0 if isinstance(factor, Tensor) else factor
    values = *rows_at(x_TN), *addresses, out_TN.data_ptr(), N, single
    call(task_driver(), SCALE, (_scale_task(), T, max(1, NUMBERS_A_PIECE // N), *values))
    return out_TN
