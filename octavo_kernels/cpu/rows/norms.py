"""``rms_norm`` and ``layer_norm`` in float32: a row's sums are dot products, whose order depends on no other row."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from octavo.ops.norms import layer_norm, rms_norm
from octavo_kernels.cpu.calls import call, task_driver
from octavo_kernels.cpu.compiled import inlined, rarely_used, task
from octavo_kernels.cpu.linear.dense_dot import dense_dot
from octavo_kernels.cpu.memory import fields, keep, read, view, whole_lines
from octavo_kernels.cpu.tensors import address, declines_floats, whole_vectors
from octavo_kernels.cpu.vector_ir import FLOAT32, LANES

NUMBERS_A_PIECE = 8192
ARGUMENTS = fields("task T piece x stride weight added out width num_columns eps:float")
"""Rows have ``width`` numbers, a multiple of 16; those behind the columns are zeros. Rows of x are ``stride`` bytes
apart. ``added``: the residual of each
row, or 0; the bias of all rows."""


@inlined
def normalise_row(x_at: int, weight_at: int, out_at: int, width: int, num_columns: int, eps: float) -> None:
    """``rms_norm`` of one row."""
    total = np.empty(1, np.float32)
    dense_dot(FLOAT32, x_at, 0, LANES, x_at, width, total.ctypes.data, 4, 1, 1)
    scale = np.float32(1) / np.sqrt(total[0] / np.float32(num_columns) + np.float32(eps))
    x, weight, out = view(x_at, width, np.float32), view(weight_at, width, np.float32), view(out_at, width, np.float32)
    for i in range(width):
        out[i] = x[i] * scale * weight[i]


@rarely_used
@task
def _rms_task(arguments: int, begin: int, end: int) -> None:
    """Task over rows."""
    a = read(arguments, ARGUMENTS)
    for t in range(begin, end):
        at = 4 * a.width * t
        normalise_row(a.x + a.stride * t, a.weight, a.out + at, a.width, a.num_columns, a.eps)
        if a.added:
            residual, out = view(a.added + at, a.width, np.float32), view(a.out + at, a.width, np.float32)
            for i in range(a.width):
                out[i] += residual[i]


@rarely_used
@task
def _layer_task(arguments: int, begin: int, end: int) -> None:
    """Task over rows."""
    a = read(arguments, ARGUMENTS)
    weight, bias = view(a.weight, a.width, np.float32), view(a.added, a.width, np.float32)
    sums, ones, D = np.empty(2, np.float32), whole_lines(1, a.width), np.float32(a.num_columns)
    total, square = sums.ctypes.data, sums.ctypes.data + 4
    for i in range(a.width):
        ones[0, i] = 1
    for t in range(begin, end):
        at = 4 * a.width * t
        x, out = view(a.x + a.stride * t, a.width, np.float32), view(a.out + at, a.width, np.float32)
        dense_dot(FLOAT32, a.x + a.stride * t, 0, LANES, ones.ctypes.data, a.width, total, 4, 1, 1)
        mean = sums[0] / D
        for i in range(a.width):
            out[i] = x[i] - mean
        for i in range(a.num_columns, a.width):
            out[i] = 0
        dense_dot(FLOAT32, a.out + at, 0, LANES, a.out + at, a.width, square, 4, 1, 1)
        scale = np.float32(1) / np.sqrt(sums[1] / D + np.float32(a.eps))
        for i in range(a.width):
            out[i] = out[i] * scale * weight[i] + bias[i]
    keep((sums, ones))


def _normalise(task_at: int, x_TD: Tensor, weight_D: Tensor, added: Tensor | None, eps: float) -> Tensor:
    x, weight = x_TD.float(), whole_vectors(weight_D.float())
    if x.dim() != 2 or x.stride(1) != 1 or x.shape[1] % LANES:  # else it may be some columns of wider rows
        x = whole_vectors(x)
    added = None if added is None else whole_vectors(added.float())
    D, width = x_TD.shape[-1], x.shape[-1]
    out = torch.empty(x.shape)
    stride = 4 * (x.stride(0) if x.dim() == 2 else width)
    addresses = x.data_ptr(), stride, weight.data_ptr(), address(added), out.data_ptr()
    values = (task_at, x.numel() // width, max(1, NUMBERS_A_PIECE // width), *addresses, width, D, eps)
    call(task_driver(), ARGUMENTS, values)
    return (out if width == D else out[..., :D].contiguous()).to(x_TD.dtype)


@rms_norm.kernel(device="cpu", name="numba", preference=10, supports=declines_floats)
def rms_norm_numba(x_TD: Tensor, weight_D: Tensor, eps: float, residual_TD: Tensor | None = None) -> Tensor:
    """See ``ops.rms_norm``; ``x`` may have more than two axes."""
    return _normalise(_rms_task(), x_TD, weight_D, residual_TD, eps)


@layer_norm.kernel(device="cpu", name="numba", preference=10, supports=declines_floats)
def layer_norm_numba(x_TD: Tensor, weight_D: Tensor, bias_D: Tensor, eps: float) -> Tensor:
    """See ``ops.layer_norm``; ``x`` may have more than two axes."""
    return _normalise(_layer_task(), x_TD, weight_D, bias_D, eps)
