"""``apply_rope`` in float32: one pass over queries and keys, which may be parts of a wider projection."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
from torch import Tensor

from octavo.ops.apply_rope import apply_rope
from octavo.ops.cpu.compiled import compiled, compiled_task, inlined
from octavo.ops.cpu.memory import fields, keep, read, view
from octavo.ops.cpu.tensors import by_token, declines_floats
from octavo.ops.cpu.threads import pool_address, run

NUMBERS_A_CHUNK = 16384
ARGUMENTS = fields(
    q=int, k=int, q_out=int, k_out=int, q_stride=int, k_stride=int, cos=int, sin=int, N=int, K=int, H=int, R=int
)
"""Strides are numbers from one token to the next; the heads of a token lie side by side."""


@inlined
def _turn(x: Any, out: Any, cos: Any, sin: Any, num_heads: int, head_dim: int) -> None:
    R = cos.size
    for head in range(num_heads):
        first = head * head_dim
        second = first + R
        for i in range(R):
            out[first + i] = x[first + i] * cos[i] - x[second + i] * sin[i]
            out[second + i] = x[second + i] * cos[i] + x[first + i] * sin[i]
        for i in range(second + R, first + head_dim):
            out[i] = x[i]


@functools.cache
def _task() -> int:
    """Task over tokens."""

    def rotate(arguments: int, begin: int, end: int) -> None:
        a = read(arguments, ARGUMENTS)
        q_width, k_width = a.N * a.H, a.K * a.H
        for t in range(begin, end):
            cos, sin = view(a.cos + 4 * t * a.R, a.R, np.float32), view(a.sin + 4 * t * a.R, a.R, np.float32)
            q, q_out = a.q + 4 * t * a.q_stride, a.q_out + 4 * t * q_width
            k, k_out = a.k + 4 * t * a.k_stride, a.k_out + 4 * t * k_width
            _turn(view(q, q_width, np.float32), view(q_out, q_width, np.float32), cos, sin, a.N, a.H)
            _turn(view(k, k_width, np.float32), view(k_out, k_width, np.float32), cos, sin, a.K, a.H)

    return compiled_task(rotate)


@compiled
def _rotate_all(
    pool: int, task: int, q: int, k: int, q_out: int, k_out: int, strides: Any, cos: int, sin: int, T: int, sizes: Any
) -> None:
    arguments = np.empty(1, ARGUMENTS)
    a = arguments[0]
    a.q, a.k, a.q_out, a.k_out, a.cos, a.sin = q, k, q_out, k_out, cos, sin
    a.q_stride, a.k_stride = strides
    a.N, a.K, a.H, a.R = sizes
    run(pool, task, arguments.ctypes.data, T, max(1, NUMBERS_A_CHUNK // ((a.N + a.K) * a.H)))
    keep(arguments)


@apply_rope.kernel(device="cpu", name="numba", preference=10, supports=declines_floats)
def apply_rope_numba(q_TNH: Tensor, k_TKH: Tensor, cos_TR: Tensor, sin_TR: Tensor) -> tuple[Tensor, Tensor]:
    """See ``ops.apply_rope``."""
    q, k, cos, sin = by_token(q_TNH), by_token(k_TKH), cos_TR.contiguous(), sin_TR.contiguous()
    T, N, H = q.shape
    if cos.dtype != torch.float32 or sin.dtype != torch.float32 or 2 * cos.shape[1] > H:
        raise ValueError(f"apply_rope: cos and sin must be float32 [T, at most {H // 2}]")
    q_out, k_out = torch.empty(T, N, H), torch.empty(k.shape)
    _rotate_all(
        pool_address(),
        _task(),
        q.data_ptr(),
        k.data_ptr(),
        q_out.data_ptr(),
        k_out.data_ptr(),
        (q.stride(0), k.stride(0)),
        cos.data_ptr(),
        sin.data_ptr(),
        T,
        (N, k.shape[1], H, cos.shape[1]),
    )
    return q_out.to(q_TNH.dtype), k_out.to(k_TKH.dtype)
