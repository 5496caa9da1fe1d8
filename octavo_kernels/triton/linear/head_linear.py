"""``head_linear`` for CUDA devices: a few rows in tiles, where a launch is most of the time, and many by cuBLAS.

Where rows may not depend on others, tiles of one form serve every number of rows.

Shapes: T rows, N heads, K inputs, O outputs; a tile's rows M, its outputs B and the inputs C that it takes at a time.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.ops.linear.linear import head_linear
from octavo_kernels.triton.launch import (
    after_predecessor,
    declines_floats,
    is_compiling,
    is_invariant,
    launch,
    prefetch_lines,
)

MOST_IN_TILES = 256
"""Rows up to which tiles are faster than cuBLAS, whose kernels do not start before the one before them has ended."""
LEAST_ROWS, MOST_ROWS = 16, 64
"""Rows of a tile: what tensor cores take at least, and where reading the weight again for more rows stops to matter."""


class Tile(NamedTuple):
    """How much a program computes, how many inputs at a time, and how many such chunks are in flight."""

    rows: int
    outputs: int
    inputs: int
    stages: int

    def constants(self) -> dict[str, Any]:
        """Compile-time constants of a kernel."""
        return {"ROWS": self.rows, "BLOCK_O": self.outputs, "BLOCK_K": self.inputs, "STAGES": self.stages}


def takes_tiles(num_rows: int) -> bool:
    """Whether this many rows are computed in tiles, not by cuBLAS."""
    return num_rows <= MOST_IN_TILES or is_invariant()


def tile_of(num_rows: int, dtype: torch.dtype) -> Tile:
    """The tile for this many rows; the same for all where results may not depend on their number."""
    if dtype == torch.float32:  # its products are made of multiply-adds
        return Tile(16, 32, 32, 2)
    needed = MOST_ROWS if is_invariant() else triton.next_power_of_2(num_rows)
    rows = min(max(needed, LEAST_ROWS), MOST_ROWS)
    return Tile(rows, 64, 128, 3 if rows == MOST_ROWS else 4)  # at most 96 KB of shared memory


@head_linear.kernel(device="cuda", name="triton", preference=10, supports=declines_floats)
def head_linear_triton(x_TNK: Tensor, weight_NOK: Tensor) -> Tensor:
    """See ``ops.head_linear``; the result is contiguous."""
    (T, N, K), outputs = x_TNK.shape, weight_NOK.shape[1]
    out_TNO = x_TNK.new_empty(T, N, outputs)
    if not takes_tiles(T):
        cublas_head_linear(x_TNK, weight_NOK, out_TNO)
    else:
        x_TNK = x_TNK if x_TNK.stride(2) == 1 else x_TNK.contiguous()
        tile = tile_of(T, x_TNK.dtype)
        grid = triton.cdiv(T, tile.rows), triton.cdiv(outputs, tile.outputs), N
        tensors = x_TNK, weight_NOK.contiguous(), out_TNO
        launch(head_linear_kernel, grid, *tensors, T, *x_TNK.stride()[:2], K=K, OUTPUTS=outputs, **tile.constants())
    return out_TNO


def cublas_head_linear(x_TNK: Tensor, weight_NOK: Tensor, out_TNO: Tensor) -> None:
    """Fill ``out``, whose rows and heads may be parts of wider ones."""
    if not is_compiling():  # there is nothing to compile in it
        torch.bmm(x_TNK.transpose(0, 1), weight_NOK.mT, out=out_TNO.transpose(0, 1))


@triton.jit(do_not_specialize=["T"])
def head_linear_kernel(
    x_ptr: tl.tensor, weight_ptr: tl.tensor, out_ptr: tl.tensor, T: tl.tensor, row_stride: tl.tensor,
    head_stride: tl.tensor, K: tl.constexpr, OUTPUTS: tl.constexpr, ROWS: tl.constexpr, BLOCK_O: tl.constexpr,
    BLOCK_K: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """A tile of one head's outputs."""
    n = tl.program_id(2)
    t_M = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    o_B = tl.program_id(1) * BLOCK_O + tl.arange(0, BLOCK_O)
    weight_ptr += n.to(tl.int64) * OUTPUTS * K
    prefetch_outputs(weight_ptr, o_B, K, OUTPUTS, PDL)
    after_predecessor(PDL)
    x_M = x_ptr + t_M.to(tl.int64) * row_stride + n * head_stride
    y_MB = head_tile(x_M, t_M < T, weight_ptr, o_B, K, OUTPUTS, BLOCK_K, STAGES)
    out_M1 = out_ptr + ((t_M.to(tl.int64) * tl.num_programs(2) + n) * OUTPUTS)[:, None]
    mask = (t_M < T)[:, None] & (o_B < OUTPUTS)[None, :]
    tl.store(out_M1 + o_B[None, :], y_MB.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def prefetch_outputs(
    weight_ptr: tl.tensor, o_B: tl.tensor, K: tl.constexpr, OUTPUTS: tl.constexpr, PDL: tl.constexpr
) -> None:
    """Bring the weights of these outputs of a head into the cache, while the kernel before this one runs."""
    if PDL:
        prefetch_lines(weight_ptr + (tl.minimum(o_B, OUTPUTS - 1) * K)[:, None], K)


@triton.jit
def head_tile(
    x_M: tl.tensor, is_row_M: tl.tensor, weight_ptr: tl.tensor, o_B: tl.tensor, K: tl.constexpr, OUTPUTS: tl.constexpr,
    BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Outputs ``o`` of the rows that begin at ``x``, in float32, by the weight of one head."""
    y_MB = tl.zeros([x_M.shape[0], o_B.shape[0]], tl.float32)
    for k in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        k_C = k + tl.arange(0, BLOCK_K)
        x_MC = tl.load(x_M[:, None] + k_C[None, :], mask=is_row_M[:, None] & (k_C < K)[None, :], other=0.0)
        at_BC = weight_ptr + (o_B * K)[:, None] + k_C[None, :]
        weight_BC = tl.load(at_BC, mask=(o_B < OUTPUTS)[:, None] & (k_C < K)[None, :], other=0.0)
        y_MB = tl.dot(x_MC, tl.trans(weight_BC), y_MB, input_precision="ieee")
    return y_MB
