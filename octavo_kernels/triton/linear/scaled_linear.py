"""``scaled_linear`` for CUDA devices: rows are rounded to 8 bits, with a scale each, and multiplied as such.

A few rows are multiplied with all parts fused, many by cuBLAS. A single row is not rounded, but under ``invariant()``:
reading the weight takes as long, and rounding is a kernel of its own.

Shapes: T rows, K inputs, N outputs.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import ScalingType, scaled_mm

from octavo.ops.linear import PLAIN, Fused
from octavo.ops.scaled_linear import ScaledValues, scaled_linear
from octavo_kernels.triton.launch import is_compiling, is_invariant
from octavo_kernels.triton.linear.gemv import GemvConfig, gemv
from octavo_kernels.triton.linear.invariant_linear import BLOCK_T, invariant_config
from octavo_kernels.triton.linear.linear import check_gates, contiguous
from octavo_kernels.triton.linear.linear_configs import bucket_of
from octavo_kernels.triton.linear.quantize_rows import finish_rows, quantize_rows
from octavo_kernels.triton.linear.skinny_gemm import SkinnyConfig, skinny_gemm
from octavo_kernels.triton.tuning.linear_cost import Product, gpu_of, ranked

ADA = (8, 9)
"""The first devices that multiply floating-point numbers of 8 bits."""
LIBRARY_MULTIPLE = 16
"""Of inputs and outputs, for cuBLAS's products of 8-bit numbers."""
FEWEST_ROWS = 16
"""Of a tile."""
FEW_ROWS = 64
"""Up to here memory is the limit whatever the shape."""


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
        config, in_turn = invariant_config(T, N // 2 if is_gated else N, K, torch.float8_e4m3fn)
        return config, BLOCK_T, in_turn
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
