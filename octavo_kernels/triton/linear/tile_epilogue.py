"""The end of a matrix product's tile: the sums of its splits, then bias, gate and residual.

Shapes: a tile is [outputs, rows] of the product, for outputs and rows of both operands.
"""

from __future__ import annotations

import triton
import triton.language as tl

from octavo_kernels.triton.activation import gated, squared_relu


@triton.jit
def store_split(
    acc: tl.tensor, up: tl.tensor, squares: tl.tensor, at: tl.tensor, at_squares: tl.tensor, split: tl.tensor,
    counter_ptr: tl.tensor, SUMS: tl.constexpr, SPLITS: tl.constexpr, GATED: tl.constexpr, HAS_NORM: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Store the sums of a split; whether it was the last of its tile to do so."""
    tl.store(at + split * SUMS, acc)
    if GATED:
        tl.store(at + split * SUMS + SUMS // 2, up)
    if HAS_NORM:
        tl.store(at_squares + split * squares.shape[0], squares)
    tl.debug_barrier()
    return tl.atomic_add(counter_ptr, 1, sem="acq_rel", scope="gpu") == SPLITS - 1


@triton.jit
def add_splits(
    acc: tl.tensor, up: tl.tensor, squares: tl.tensor, at: tl.tensor, at_squares: tl.tensor,
    SUMS: tl.constexpr, SPLITS: tl.constexpr, GATED: tl.constexpr, HAS_NORM: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Sums of all splits, in their order; past the first-level cache, which may hold what was there before."""
    for s in tl.static_range(SPLITS):
        acc_s = tl.load(at + s * SUMS, cache_modifier=".cg")
        acc = acc_s if s == 0 else acc + acc_s
        if GATED:
            up_s = tl.load(at + s * SUMS + SUMS // 2, cache_modifier=".cg")
            up = up_s if s == 0 else up + up_s
        if HAS_NORM:
            squares_s = tl.load(at_squares + s * squares.shape[0], cache_modifier=".cg")
            squares = squares_s if s == 0 else squares + squares_s
    return acc, up, squares


@triton.jit
def _of_outputs(ptr: tl.tensor, n: tl.tensor, num_outputs: tl.tensor) -> tl.tensor:
    """Entries of a vector of outputs, [outputs, 1] in float32."""
    return tl.load(ptr + n, mask=n < num_outputs, other=0.0).to(tl.float32)[:, None]


@triton.jit
def residual_tile(ptr: tl.tensor, at: tl.tensor, mask: tl.tensor) -> tl.tensor:
    """The residual in float32, 0 without one."""
    if ptr is None:  # noqa: SIM108 (an expression would load in any case)
        tile = tl.zeros(mask.shape, tl.float32)
    else:
        tile = tl.load(ptr + at, mask=mask, other=0.0).to(tl.float32)
    return tile


@triton.jit
def finish(
    acc: tl.tensor, up: tl.tensor, residual: tl.tensor, outputs: tl.tensor, num_outputs: tl.tensor,
    bias_ptr: tl.tensor, ACTIVATION: tl.constexpr, ALPHA: tl.constexpr = 0.0, LIMIT: tl.constexpr = 0.0,
) -> tl.tensor:  # fmt: skip
    """Bias, gate and residual of the sums of a tile."""
    if bias_ptr is not None:
        acc += _of_outputs(bias_ptr, outputs, num_outputs)
    if ACTIVATION == "squared_relu":
        acc = squared_relu(acc)
    elif ACTIVATION is not None:
        if bias_ptr is not None:
            up += _of_outputs(bias_ptr + num_outputs, outputs, num_outputs)
        acc = gated(acc, up, ACTIVATION, ALPHA, LIMIT)
    return acc + residual
