"""``linear`` for dense weights of float32, bfloat16 and float16, in float32 arithmetic."""

from __future__ import annotations

import functools

import numpy as np
import torch
from torch import Tensor

from octavo.ops.cpu.compiled import compiled, compiled_task
from octavo.ops.cpu.dense_dot import dense_dot
from octavo.ops.cpu.memory import fields, keep, read
from octavo.ops.cpu.tensors import FORMATS, declines_floats, whole_vectors
from octavo.ops.cpu.threads import pool_address, run
from octavo.ops.cpu.vector_ir import FORMAT_BYTES, LANES
from octavo.ops.linear import Activation, compose, linear

ROWS_AT_ONCE = 64
"""Weight rows that stay in the second-level cache while all tokens go over them; also the least for a thread."""
ARGUMENTS = fields(weight=int, x=int, out=int, num_tokens=int, num_rows=int, num_columns=int)


@functools.cache
def _task(number_format: int) -> int:
    """Task over blocks of ROWS_AT_ONCE rows of the weight."""
    item = FORMAT_BYTES[number_format]

    def multiply(arguments: int, begin: int, end: int) -> None:
        a = read(arguments, ARGUMENTS)
        T, row_bytes, steps, stride = a.num_tokens, item * a.num_columns, a.num_columns // LANES, 4 * a.num_rows
        for block in range(begin, end):
            last = min((block + 1) * ROWS_AT_ONCE, a.num_rows)
            t = 0
            while t < T:
                tokens = 6 if t + 6 <= T else 1
                n = block * ROWS_AT_ONCE
                while n < last:
                    rows = 4 if n + 4 <= last else 1
                    weight, x, out = a.weight + n * row_bytes, a.x + t * row_bytes, a.out + t * stride + 4 * n
                    if rows == 4:
                        dense_dot(number_format, weight, x, row_bytes, steps, out, stride, 4, tokens)
                    else:
                        for i in range(tokens):
                            at = i * row_bytes, i * stride
                            dense_dot(number_format, weight, x + at[0], row_bytes, steps, out + at[1], stride, 1, 1)
                    n += rows
                t += tokens

    return compiled_task(multiply)


@compiled
def _multiply(pool: int, task: int, weight: int, x: int, out: int, T: int, N: int, K: int) -> None:
    arguments = np.empty(1, ARGUMENTS)
    a = arguments[0]
    a.weight, a.x, a.out, a.num_tokens, a.num_rows, a.num_columns = weight, x, out, T, N, K
    run(pool, task, arguments.ctypes.data, (N + ROWS_AT_ONCE - 1) // ROWS_AT_ONCE, 1)
    keep(arguments)


@linear.kernel(device="cpu", name="numba", preference=10, supports=declines_floats)
def linear_numba(
    x_TK: Tensor,
    weight_NK: Tensor,
    bias_N: Tensor | None = None,
    norm_K: Tensor | None = None,
    eps: float = 0.0,
    residual_TN: Tensor | None = None,
    activation: Activation | None = None,
) -> Tensor:
    """See ``ops.linear``."""
    return compose(x_TK, norm_K, eps, residual_TN, activation, lambda normed_TK: _linear(normed_TK, weight_NK, bias_N))


def _linear(x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None) -> Tensor:
    (T, K), (N, K_weight) = x_TK.shape, weight_NK.shape
    if K_weight != K or weight_NK.dtype != x_TK.dtype:
        raise ValueError(f"linear: x is {K} columns of {x_TK.dtype}, the weight {K_weight} of {weight_NK.dtype}")
    x, weight = whole_vectors(x_TK), whole_vectors(weight_NK)
    y_TN = torch.empty(T, N)
    task = _task(FORMATS[x.dtype])
    _multiply(pool_address(), task, weight.data_ptr(), x.data_ptr(), y_TN.data_ptr(), T, N, x.shape[1])
    if bias_N is not None:
        y_TN += bias_N
    return y_TN.to(x.dtype)
