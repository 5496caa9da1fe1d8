"""Normalisation of rows."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.ops.norms import layer_norm, rms_norm
from octavo_kernels.triton.launch import after_predecessor, declines_floats, launch

# ---- rms_norm: ``rms_norm`` for CUDA devices: a row stays in registers, and its sum has one order whatever the other
# rows.


NUMBERS_A_PROGRAM = 1024
"""Narrow rows, like those of heads, share a program."""


@triton.jit(do_not_specialize=["num_rows"])
def rms_norm_kernel(
    x_ptr: tl.tensor, weight_ptr: tl.tensor, residual_ptr: tl.tensor, out_ptr: tl.tensor, eps: tl.tensor,
    num_rows: tl.tensor, row_stride: tl.tensor, D: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:  # fmt: skip
    """ROWS rows of D columns, padded to BLOCK with zeros."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    d = tl.arange(0, BLOCK)[None, :]
    mask = (row < num_rows) & (d < D)
    weight = tl.load(weight_ptr + d, mask=d < D, other=0.0).to(tl.float32)
    after_predecessor(PDL)
    x = tl.load(x_ptr + row * row_stride + d, mask=mask, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 1) / D + eps)
    y = x * scale[:, None] * weight
    if residual_ptr is not None:
        y += tl.load(residual_ptr + row * D + d, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * D + d, y.to(out_ptr.dtype.element_ty), mask=mask)


@rms_norm.kernel(device="cuda", name="triton", preference=10, supports=declines_floats)
def rms_norm_triton(x_TD: Tensor, weight_D: Tensor, eps: float, residual_TD: Tensor | None = None) -> Tensor:
    """See ``ops.rms_norm``; ``x`` may have more than two axes."""
    D = x_TD.shape[-1]
    x = x_TD.reshape(-1, D)
    if x.stride(1) != 1:
        x = x.contiguous()
    out = torch.empty_like(x_TD, memory_format=torch.contiguous_format)
    block = triton.next_power_of_2(D)
    rows = max(1, NUMBERS_A_PROGRAM // block)
    if len(x):
        grid = (triton.cdiv(len(x), rows),)
        warps = min(max(block * rows // 512, 1), 16)
        residual = None if residual_TD is None else residual_TD.contiguous()
        launch(
            rms_norm_kernel, grid, x, weight_D, residual, out, eps, len(x), x.stride(0), D, rows, block,
            num_warps=warps,
        )  # fmt: skip
    return out


# ---- layer_norm: ``layer_norm`` for CUDA devices: a row stays in registers, and its sums have one order whatever the
# other rows.


@triton.jit
def layer_norm_kernel(
    x_ptr: tl.tensor, weight_ptr: tl.tensor, bias_ptr: tl.tensor, out_ptr: tl.tensor, eps: tl.tensor,
    row_stride: tl.tensor, D: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """One row of D columns, filled up to BLOCK with zeros."""
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK)
    mask = d < D
    weight = tl.load(weight_ptr + d, mask=mask, other=0.0).to(tl.float32)
    bias = tl.load(bias_ptr + d, mask=mask, other=0.0).to(tl.float32)
    after_predecessor(PDL)
    x = tl.load(x_ptr + row * row_stride + d, mask=mask, other=0.0).to(tl.float32)
    centred = tl.where(mask, x - tl.sum(x, 0) / D, 0.0)
    scale = tl.rsqrt(tl.sum(centred * centred, 0) / D + eps)
    tl.store(out_ptr + row * D + d, (centred * scale * weight + bias).to(out_ptr.dtype.element_ty), mask=mask)


@layer_norm.kernel(device="cuda", name="triton", preference=10, supports=declines_floats)
def layer_norm_triton(x_TD: Tensor, weight_D: Tensor, bias_D: Tensor, eps: float) -> Tensor:
    """See ``ops.layer_norm``; ``x`` may have more than two axes."""
    D = x_TD.shape[-1]
    x = x_TD.reshape(-1, D)
    if x.stride(1) != 1:
        x = x.contiguous()
    out = torch.empty_like(x_TD, memory_format=torch.contiguous_format)
    block = triton.next_power_of_2(D)
    if len(x):
        warps = min(max(block // 512, 1), 16)
        launch(layer_norm_kernel, (len(x),), x, weight_D, bias_D, out, eps, x.stride(0), D, block, num_warps=warps)
    return out
