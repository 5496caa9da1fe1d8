"""``scaled_linear`` for CUDA devices: rows are rounded to 8 bits, with a scale each, and multiplied as such.

A few rows are multiplied with all parts fused, many by cuBLAS. A single row is not rounded, but under ``invariant()``:
reading the weight takes as long, and rounding is a kernel of its own.

Shapes: T rows, K inputs, N outputs.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import ScalingType, scaled_mm

from octavo.ops.linear.linear import PLAIN, Fused
from octavo.ops.linear.scaled_linear import ScaledValues, scaled_linear
from octavo_kernels.triton.activation import gated
from octavo_kernels.triton.launch import after_predecessor, is_compiling, is_invariant, launch
from octavo_kernels.triton.linear.gemv import GemvConfig, gemv
from octavo_kernels.triton.linear.invariant_linear import invariant_tiles
from octavo_kernels.triton.linear.linear import check_gates, contiguous
from octavo_kernels.triton.linear.linear_configs import bucket_of
from octavo_kernels.triton.linear.skinny_gemm import SkinnyConfig, skinny_gemm
from octavo_kernels.triton.tuning.linear_cost import Product, gpu_of, ranked

# Rows rounded to numbers of 8 bits with a scale each, and the end of a product of such rows.
# Shapes: T rows, K inputs, N outputs.

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


ADA = (8, 9)
"""The first devices that multiply floating-point numbers of 8 bits."""
LIBRARY_MULTIPLE = 16
"""Of inputs and outputs, for cuBLAS's products of 8-bit numbers."""
FEWEST_ROWS = 16
"""Of a tile."""
FEW_ROWS = 64
"""Up to here memory is the limit whatever the shape."""
MANY_CHUNKS, LONG_ROW = 4, GemvConfig(rows=1, block_k=2048, warps=8)
"""For one row of x and rows of the weight with more chunks of columns than that. Several such rows in a program take
more registers than a thread has: 27.9 us for 4,096 rows of 14,336 FP8 numbers on an H200, and 17.0 a row at a time."""


def declines_scaled(dtype: torch.dtype) -> str | None:
    """Why products of 8-bit numbers cannot take activations of this type here, or ``None``."""
    if dtype not in (torch.bfloat16, torch.float16):
        return f"activations must be bfloat16 or float16; these are {dtype}"
    if torch.version.hip is not None or (torch.cuda.is_available() and torch.cuda.get_device_capability() < ADA):
        return "the device does not multiply floating-point numbers of 8 bits"
    return None


@scaled_linear.kernel(device="cuda", name="triton", preference=10, supports=declines_scaled)
def scaled_linear_triton(x_TK: Tensor, weight: ScaledValues, fused: Fused = PLAIN) -> Tensor:
    """See ``ops.scaled_linear``; for a scale per output. The residual is overwritten and shares no memory with x.

    Raises ``ValueError`` for shapes that do not go together.
    """
    (T, K), (N, K_weight) = x_TK.shape, weight.values_NK.shape
    if K_weight != K or weight.group != K:
        raise ValueError(f"scaled_linear: x has {K} columns, the weight {K_weight} in groups of {weight.group}")
    check_gates("scaled_linear", N, fused)
    if T == 0:
        return x_TK.new_empty(0, fused.width(N))
    x_TK, fused, is_gated = x_TK.contiguous(), contiguous(fused), fused.activation is not None
    if T == 1 and not is_invariant():
        one = _of_bytes(Product(N, -(-K // 2), 1, is_gated), x_TK.device)
        assert isinstance(one, GemvConfig)
        if not is_gated and MANY_CHUNKS * one.block_k < K:
            one = LONG_ROW
        return gemv(x_TK, weight.values_NK, fused, one, weight.scales_NG)
    values_TK, x_scales_T1 = quantize_rows(x_TK, fused.norm_K, fused.eps, weight.values_NK.dtype)
    fused = fused._replace(norm_K=None)
    if T > FEW_ROWS and not is_invariant() and K % LIBRARY_MULTIPLE == N % LIBRARY_MULTIPLE == 0:
        return _by_library(values_TK, x_scales_T1, weight, fused, x_TK.dtype)
    config, block_t, in_turn = _config(T, N, K, is_gated, x_TK.device)
    return skinny_gemm(
        *(values_TK, weight.values_NK, fused, config, block_t, in_turn),
        out_dtype=x_TK.dtype,
        scales=(x_scales_T1, weight.scales_NG),
    )


def _config(T: int, N: int, K: int, is_gated: bool, device: torch.device) -> tuple[SkinnyConfig, int, bool]:
    """Tiling parameters, rows of a tile, and whether a program takes the splits of a tile in turn."""
    if is_invariant():
        return invariant_tiles(T, N // 2 if is_gated else N, K, torch.float8_e4m3fn, is_gated)
    rows = bucket_of(max(min(T, FEW_ROWS), FEWEST_ROWS))
    assert rows is not None
    few = _of_bytes(Product(N, -(-K // 2), rows, is_gated), device)
    assert isinstance(few, SkinnyConfig)
    return replace(few, prefetch=2), rows, False


@functools.cache
def _of_bytes(product: Product, device: torch.device) -> GemvConfig | SkinnyConfig:
    """The configuration for twice as many columns of 8 bits as the product has of 16: their bytes are the same."""
    best = ranked(product, gpu_of(device))[0]
    return replace(best, block_k=2 * best.block_k)


def _by_library(
    values_TK: Tensor, x_scales_T1: Tensor, weight: ScaledValues, fused: Fused, dtype: torch.dtype
) -> Tensor:
    """The products by cuBLAS, which applies the scales of FP8 numbers where nothing else follows.

    Its products in bfloat16 without scales are faster for some rows, and round no more than those with scales. Those of
    integers are exact, of 32 bits.
    """
    is_int8 = values_TK.dtype == torch.int8
    is_bare = fused.bias_N is None and fused.residual_TN is None and fused.activation is None
    is_last = is_bare and not is_int8 and dtype == torch.bfloat16
    if is_compiling():  # there is nothing to compile in it
        shape = len(values_TK), len(weight.values_NK)
        y_TN = x_scales_T1.new_empty(shape, dtype=torch.int32 if is_int8 else torch.bfloat16)
    elif is_int8:
        y_TN = torch._int_mm(values_TK, weight.values_NK.T)
    elif is_last:
        y_TN = _multiply(values_TK, weight.values_NK, x_scales_T1, weight.scales_NG.T, ScalingType.RowWise)
    else:
        one = _one(values_TK.device)
        y_TN = _multiply(values_TK, weight.values_NK, one, one, ScalingType.TensorWise)
    return y_TN if is_last else finish_rows(y_TN, x_scales_T1, weight.scales_NG, fused, dtype)


def _multiply(values_TK: Tensor, weight_NK: Tensor, x_scales: Tensor, scales: Tensor, kind: ScalingType) -> Tensor:
    return scaled_mm(
        values_TK, weight_NK.T, x_scales, kind, scales, kind, output_dtype=torch.bfloat16, use_fast_accum=True
    )


@functools.cache
def _one(device: torch.device) -> Tensor:
    return torch.ones((), device=device)
