"""``layer_norm`` in float32: both sums of a row are dot products, whose order does not depend on other rows."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from octavo.ops.norms import layer_norm
from octavo_kernels.cpu.calls import call
from octavo_kernels.cpu.compiled import compiled_task, rarely_used
from octavo_kernels.cpu.linear.dense_dot import dense_dot
from octavo_kernels.cpu.memory import fields, keep, read, view, whole_lines
from octavo_kernels.cpu.task_driver import task_driver
from octavo_kernels.cpu.tensors import declines_floats, whole_vectors
from octavo_kernels.cpu.vector_ir import FLOAT32, LANES

NUMBERS_A_PIECE = 8192
ARGUMENTS = fields("task T piece x weight bias out width num_columns eps:float")
"""Rows have ``width`` numbers, a multiple of 16; those behind the columns are zeros."""


@rarely_used
def _task() -> int:
    """Task over rows."""

    def normalise(arguments: int, begin: int, end: int) -> None:
        a = read(arguments, ARGUMENTS)
        weight, bias = view(a.weight, a.width, np.float32), view(a.bias, a.width, np.float32)
        sums, ones, D = np.empty(2, np.float32), whole_lines(1, a.width), np.float32(a.num_columns)
        total, square = sums.ctypes.data, sums.ctypes.data + 4
        for i in range(a.width):
            ones[0, i] = 1
        for t in range(begin, end):
            at = 4 * a.width * t
            x, out = view(a.x + at, a.width, np.float32), view(a.out + at, a.width, np.float32)
            dense_dot(FLOAT32, a.x + at, 0, LANES, ones.ctypes.data, a.width, total, 4, 1, 1)
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

    return compiled_task(normalise)


@layer_norm.kernel(device="cpu", name="numba", preference=10, supports=declines_floats)
def layer_norm_numba(x_TD: Tensor, weight_D: Tensor, bias_D: Tensor, eps: float) -> Tensor:
    """See ``ops.layer_norm``; ``x`` may have more than two axes."""
    x, weight, bias = (whole_vectors(part.float()) for part in (x_TD, weight_D, bias_D))
    D, width = x_TD.shape[-1], x.shape[-1]
    out = torch.empty(x.shape)
    arguments = np.empty(1, ARGUMENTS)
    addresses = x.data_ptr(), weight.data_ptr(), bias.data_ptr(), out.data_ptr()
    arguments[0] = (_task(), x.numel() // width, max(1, NUMBERS_A_PIECE // width), *addresses, width, D, eps)
    call(task_driver(), arguments)
    return (out if width == D else out[..., :D]).to(x_TD.dtype)
