"""``rms_norm`` in float32: the sum of squares is the dot product of a row with itself."""

from __future__ import annotations

import functools

import numpy as np
import torch
from torch import Tensor

from octavo.ops.cpu.compiled import compiled, compiled_task
from octavo.ops.cpu.dense_dot import dense_dot
from octavo.ops.cpu.memory import fields, keep, read, view
from octavo.ops.cpu.tensors import declines_floats, whole_vectors
from octavo.ops.cpu.threads import pool_address, run
from octavo.ops.cpu.vector_ir import FLOAT32, LANES
from octavo.ops.rms_norm import rms_norm

NUMBERS_A_CHUNK = 16384
ARGUMENTS = fields(x=int, weight=int, out=int, width=int, num_columns=int, eps=float)


@functools.cache
def _task() -> int:
    """Task over rows: ``width`` numbers apart, of which the last may be zeros that are not columns."""

    def normalise(arguments: int, begin: int, end: int) -> None:
        a = read(arguments, ARGUMENTS)
        width = a.width
        weight = view(a.weight, width, np.float32)
        total = np.empty(1, np.float32)
        for t in range(begin, end):
            row = a.x + 4 * width * t
            dense_dot(FLOAT32, row, row, 4 * width, width // LANES, total.ctypes.data, 4, 1, 1)
            mean = total[0] / np.float32(a.num_columns)
            scale = np.float32(1) / np.sqrt(mean + np.float32(a.eps))
            x, out = view(row, width, np.float32), view(a.out + 4 * width * t, width, np.float32)
            for i in range(width):
                out[i] = x[i] * scale * weight[i]

    return compiled_task(normalise)


@compiled
def _normalise_all(pool: int, task: int, x: int, weight: int, out: int, T: int, width: int, D: int, eps: float) -> None:
    arguments = np.empty(1, ARGUMENTS)
    a = arguments[0]
    a.x, a.weight, a.out, a.width, a.num_columns, a.eps = x, weight, out, width, D, eps
    run(pool, task, arguments.ctypes.data, T, max(1, NUMBERS_A_CHUNK // width))
    keep(arguments)


@rms_norm.kernel(device="cpu", name="numba", preference=10, supports=declines_floats)
def rms_norm_numba(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """See ``ops.rms_norm``; ``x`` may have more than two axes."""
    x, weight = whole_vectors(x_TD.float()), whole_vectors(weight_D.float())
    D, width = x_TD.shape[-1], x.shape[-1]
    out = torch.empty_like(x)
    rows = x.numel() // width
    _normalise_all(pool_address(), _task(), x.data_ptr(), weight.data_ptr(), out.data_ptr(), rows, width, D, eps)
    return out[..., :D].to(x_TD.dtype)
