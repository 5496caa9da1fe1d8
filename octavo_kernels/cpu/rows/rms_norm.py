"""``rms_norm`` in float32: the sum of squares is the dot product of a row with itself."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from octavo.ops.norms import rms_norm
from octavo_kernels.cpu.calls import call
from octavo_kernels.cpu.compiled import compiled_task, inlined, rarely_used
from octavo_kernels.cpu.linear.dense_dot import dense_dot
from octavo_kernels.cpu.memory import fields, read, view
from octavo_kernels.cpu.task_driver import task_driver
from octavo_kernels.cpu.tensors import address, declines_floats, whole_vectors
from octavo_kernels.cpu.vector_ir import FLOAT32, LANES

NUMBERS_A_PIECE = 8192
ARGUMENTS = fields("task T piece x weight residual out width num_columns eps:float")


@inlined
def normalise_row(x_at: int, weight_at: int, out_at: int, width: int, num_columns: int, eps: float) -> None:
    """One row of ``width`` numbers, a multiple of 16; those behind the columns are zeros."""
    total = np.empty(1, np.float32)
    dense_dot(FLOAT32, x_at, 0, LANES, x_at, width, total.ctypes.data, 4, 1, 1)
    scale = np.float32(1) / np.sqrt(total[0] / np.float32(num_columns) + np.float32(eps))
    x, weight, out = view(x_at, width, np.float32), view(weight_at, width, np.float32), view(out_at, width, np.float32)
    for i in range(width):
        out[i] = x[i] * scale * weight[i]


@rarely_used
def _task() -> int:
    """Task over rows."""

    def normalise(arguments: int, begin: int, end: int) -> None:
        a = read(arguments, ARGUMENTS)
        for t in range(begin, end):
            at = 4 * a.width * t
            normalise_row(a.x + at, a.weight, a.out + at, a.width, a.num_columns, a.eps)
            if a.residual:
                residual, out = view(a.residual + at, a.width, np.float32), view(a.out + at, a.width, np.float32)
                for i in range(a.width):
                    out[i] += residual[i]

    return compiled_task(normalise)


@rms_norm.kernel(device="cpu", name="numba", preference=10, supports=declines_floats)
def rms_norm_numba(x_TD: Tensor, weight_D: Tensor, eps: float, residual_TD: Tensor | None = None) -> Tensor:
    """See ``ops.rms_norm``; ``x`` may have more than two axes."""
    x, weight = whole_vectors(x_TD.float()), whole_vectors(weight_D.float())
    residual = None if residual_TD is None else whole_vectors(residual_TD.float())
    D, width = x_TD.shape[-1], x.shape[-1]
    out = torch.empty(x.shape)
    arguments = np.empty(1, ARGUMENTS)
    addresses = x.data_ptr(), weight.data_ptr(), address(residual), out.data_ptr()
    arguments[0] = (_task(), x.numel() // width, max(1, NUMBERS_A_PIECE // width), *addresses, width, D, eps)
    call(task_driver(), arguments)
    return (out if width == D else out[..., :D]).to(x_TD.dtype)
