"""Rows rounded to numbers of 8 bits with a scale each, and the end of a product of such rows.

Shapes: T rows, K inputs, N outputs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.ops.linear import Fused
from octavo_kernels.triton.activation import gated
from octavo_kernels.triton.launch import after_predecessor, launch

LARGEST = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}
"""Numbers that the largest of a row becomes."""
SMALLEST_SCALE = tl.constexpr(1e-30)
"""Of rows of zeros."""
BLOCK = 1024


@triton.jit
def round_kernel(
    x_ptr: tl.tensor, norm_ptr: tl.tensor, values_ptr: tl.tensor, scales_ptr: tl.tensor, eps: tl.tensor,
    K: tl.constexpr, LARGEST: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """One row, after RMSNorm if there is a norm."""
    t = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK)
    mask = k < K
    if norm_ptr is not None:
        norm = tl.load(norm_ptr + k, mask=mask, other=0.0).to(tl.float32)
    after_predecessor(PDL)
    x = tl.load(x_ptr + t * K + k, mask=mask, other=0.0).to(tl.float32)
    if norm_ptr is not None:
        x = x * tl.rsqrt(tl.sum(x * x, 0) / K + eps) * norm
    scale = tl.maximum(tl.max(tl.abs(x), 0) / LARGEST, SMALLEST_SCALE)
    values = tl.clamp(x / scale, -LARGEST, LARGEST)
    if values_ptr.dtype.element_ty == tl.int8:
        values = tl.floor(values + 0.5)
    tl.store(values_ptr + t * K + k, values.to(values_ptr.dtype.element_ty), mask=mask)
    tl.store(scales_ptr + t, scale)


def quantize_rows(x_TK: Tensor, norm_K: Tensor | None, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """``rms_norm(x)`` as numbers of this type, float8_e4m3fn or int8, [T, K], and float32 scales [T, 1]:
    ``value * scale`` is what was rounded."""
    T, K = x_TK.shape
    values_TK = torch.empty(T, K, dtype=dtype, device=x_TK.device)
    scales_T1 = torch.empty(T, 1, dtype=torch.float32, device=x_TK.device)
    block = triton.next_power_of_2(K)
    warps = min(max(block // 512, 1), 16)
    sizes = {"K": K, "LARGEST": LARGEST[dtype], "BLOCK": block}
    launch(round_kernel, (T,), x_TK, norm_K, values_TK, scales_T1, eps, **sizes, num_warps=warps)
    return values_TK, scales_T1


@triton.jit
def finish_kernel(
    sums_ptr: tl.tensor, x_scales_ptr: tl.tensor, scales_ptr: tl.tensor, bias_ptr: tl.tensor, residual_ptr: tl.tensor,
    out_ptr: tl.tensor, num_outputs: tl.tensor, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """One block of one row."""
    t = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = n < num_outputs
    row = sums_ptr + t * num_outputs
    if ACTIVATION is not None:
        row += t * num_outputs
    after_predecessor(PDL)
    x_scale = tl.load(x_scales_ptr + t)
    y = _scaled(row, n, mask, x_scale, scales_ptr, bias_ptr)
    if ACTIVATION is not None:
        up_bias_ptr = bias_ptr
        if bias_ptr is not None:
            up_bias_ptr = bias_ptr + num_outputs
        y = gated(y, _scaled(row + num_outputs, n, mask, x_scale, scales_ptr + num_outputs, up_bias_ptr), ACTIVATION)
    at = t * num_outputs + n
    if residual_ptr is not None:
        y += tl.load(residual_ptr + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, y.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _scaled(
    sums_ptr: tl.tensor, n: tl.tensor, mask: tl.tensor, x_scale: tl.tensor, scales_ptr: tl.tensor, bias_ptr: tl.tensor
) -> tl.tensor:
    """Outputs ``n`` of a row with both scales and the bias, in float32."""
    y = tl.load(sums_ptr + n, mask=mask, other=0.0).to(tl.float32)
    y *= x_scale * tl.load(scales_ptr + n, mask=mask, other=0.0)
    if bias_ptr is not None:
        y += tl.load(bias_ptr + n, mask=mask, other=0.0).to(tl.float32)
    return y


def finish_rows(sums_TN: Tensor, x_scales_T1: Tensor, scales_N1: Tensor, fused: Fused, dtype: torch.dtype) -> Tensor:
    """``act(sums * x_scales * scales + bias) + residual``; the residual is overwritten and returned."""
    bias_N, _, _, residual_TN, activation = fused
    T, outputs = len(sums_TN), fused.width(sums_TN.shape[1])
    out_TN = sums_TN.new_empty(T, outputs, dtype=dtype) if residual_TN is None else residual_TN
    grid = T, triton.cdiv(outputs, BLOCK)
    launch(
        finish_kernel, grid, sums_TN, x_scales_T1, scales_N1, bias_N, residual_TN, out_TN, outputs,
        ACTIVATION=activation, BLOCK=BLOCK,
    )  # fmt: skip
    return out_TN
