"""``block_linear`` on AVX-512 with VNNI: activations to int8, then panels of 16 outputs, shared among threads."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
from torch import Tensor

from octavo.ops.block_linear import PANEL, PackedBlocks, block_linear
from octavo.ops.cpu.block_dot import block_dot
from octavo.ops.cpu.compiled import compiled, compiled_task, inlined
from octavo.ops.cpu.host import BLOCK_FEATURES, missing
from octavo.ops.cpu.memory import fields, keep, read, view
from octavo.ops.cpu.quantize import quantize_rows
from octavo.ops.cpu.threads import pool_address, run
from octavo.ops.cpu.vector_ir import FLOAT16, FLOAT32
from octavo.ops.linear import Activation, compose

TOKENS_AT_ONCE = 256
"""Rows of activations that stay in the second-level cache while panel after panel goes over them."""
MULTIPLICATIONS_A_CHUNK = 400_000
"""About three microseconds of work: less is not worth handing to another thread."""
GROUPS_A_CHUNK = 1024


QUANTIZE = fields(x=int, q=int, scales=int, offsets=int, zero_point=int)
MULTIPLY = fields(
    values=int, scales=int, q=int, q_scales=int, q_offsets=int, out=int, num_tokens=int, num_rows=int, num_groups=int
)


@functools.cache
def _quantize_task(group: int, has_minima: int) -> int:
    """Task over the groups of all rows."""

    def quantize(arguments: int, begin: int, end: int) -> None:
        a = read(arguments, QUANTIZE)
        x, q, side = a.x + 4 * group * begin, a.q + group * begin, 4 * begin
        zero_point = np.int32(a.zero_point)
        quantize_rows(group, has_minima, x, q, a.scales + side, a.offsets + side, zero_point, end - begin)

    return compiled_task(quantize)


@functools.cache
def _panel_task(bits: int, group: int, has_minima: int, scale_format: int) -> int:
    """Task over the panels of the weight."""
    value_bytes = group * bits // 8 * PANEL
    scale_bytes = (1 + has_minima) * PANEL * (4 if scale_format == FLOAT32 else 2)

    def multiply(arguments: int, begin: int, end: int) -> None:
        a = read(arguments, MULTIPLY)
        T, N, G = a.num_tokens, a.num_rows, a.num_groups
        wide = np.empty((8, PANEL), np.float32)
        for first in range(0, T, TOKENS_AT_ONCE):
            last = min(first + TOKENS_AT_ONCE, T)
            for panel in range(begin, end):
                values, scales = a.values + panel * G * value_bytes, a.scales + panel * G * scale_bytes
                is_full = (panel + 1) * PANEL <= N
                t = first
                while t < last:
                    n = 8 if t + 8 <= last else (4 if t + 4 <= last else 1)
                    q, q_scales, q_offsets = a.q + t * G * group, a.q_scales + 4 * t * G, a.q_offsets + 4 * t * G
                    out, stride = wide.ctypes.data, 4 * PANEL
                    if is_full:
                        out, stride = a.out + 4 * (t * N + panel * PANEL), 4 * N
                    block_dot(
                        bits, group, has_minima, scale_format, values, scales, q, q_scales, q_offsets, out, stride, G, n
                    )
                    if not is_full:
                        _copy_columns(wide, a.out, t, n, N, panel * PANEL)
                    t += n

    return compiled_task(multiply)


@inlined
def _copy_columns(wide: Any, out: int, first: int, count: int, N: int, column: int) -> None:
    """The last columns of rows ``first ..`` of ``out`` [T, N], from a panel that is wider than what is left."""
    y = view(out, (first + count) * N, np.float32)
    for i in range(count):
        for r in range(N - column):
            y[(first + i) * N + column + r] = wide[i, r]


@compiled
def _multiply(
    pool: int,
    quantize: int,
    multiply: int,
    x: int,
    values: int,
    scales: int,
    out: int,
    T: int,
    N: int,
    G: int,
    group: int,
    zero_point: int,
) -> None:
    """Both tasks, one after the other; the quantised activations live only here."""
    q = np.empty(T * G * group, np.int8)
    q_scales, q_offsets = np.empty(T * G, np.float32), np.empty(T * G, np.float32)
    first, second = np.empty(1, QUANTIZE), np.empty(1, MULTIPLY)
    a, b = first[0], second[0]
    a.x, a.q, a.scales, a.offsets = x, q.ctypes.data, q_scales.ctypes.data, q_offsets.ctypes.data
    a.zero_point = zero_point
    run(pool, quantize, first.ctypes.data, T * G, GROUPS_A_CHUNK)
    b.values, b.scales, b.q, b.q_scales, b.q_offsets = values, scales, a.q, a.scales, a.offsets
    b.out, b.num_tokens, b.num_rows, b.num_groups = out, T, N, G
    panels = (N + PANEL - 1) // PANEL
    chunks = max(1, T * N * G * group // MULTIPLICATIONS_A_CHUNK)
    run(pool, multiply, second.ctypes.data, panels, (panels + chunks - 1) // chunks)
    keep((q, q_scales, q_offsets, first, second))


def _supports(dtype: torch.dtype) -> str | None:
    return missing(BLOCK_FEATURES) if dtype == torch.float32 else f"activations must be float32, got {dtype}"


@block_linear.kernel(device="cpu", name="numba", preference=10, supports=_supports)
def block_linear_numba(
    x_TK: Tensor,
    packed: PackedBlocks,
    bias_N: Tensor | None = None,
    norm_K: Tensor | None = None,
    eps: float = 0.0,
    residual_TN: Tensor | None = None,
    activation: Activation | None = None,
) -> Tensor:
    """See ``ops.block_linear``; activations are rounded to 8 bits, with the error that its contract states."""

    def multiply(normed_TK: Tensor) -> Tensor:
        y_TN = _multiply_panels(normed_TK, packed)
        return y_TN if bias_N is None else y_TN.add_(bias_N)

    return compose(x_TK, norm_K, eps, residual_TN, activation, multiply)


def _multiply_panels(x_TK: Tensor, packed: PackedBlocks) -> Tensor:
    (T, K), (N, K_weight) = x_TK.shape, packed.shape
    if K_weight != K:
        raise ValueError(f"block_linear: x has {K} columns, the weight takes {K_weight}")
    x = x_TK.contiguous()
    y_TN = torch.empty(T, N)
    has_minima, group = int(packed.has_minima), packed.group
    scale_format = FLOAT16 if packed.scales.dtype == torch.float16 else FLOAT32
    _multiply(
        pool_address(),
        _quantize_task(group, has_minima),
        _panel_task(packed.bits, group, has_minima, scale_format),
        x.data_ptr(),
        packed.values.data_ptr(),
        packed.scales.data_ptr(),
        y_TN.data_ptr(),
        T,
        N,
        K // group,
        group,
        packed.zero_point,
    )
    return y_TN
