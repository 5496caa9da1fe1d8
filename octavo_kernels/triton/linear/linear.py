"""``linear`` for CUDA devices: one row on multiply-adds, a few on tensor cores with all parts fused, many by cuBLAS.

Shapes: T rows, K inputs, N outputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.ops.linear.linear import PLAIN, Fused, linear
from octavo_kernels.triton.activation import gate_and_mul
from octavo_kernels.triton.launch import declines_floats, is_compiling, is_invariant
from octavo_kernels.triton.linear.gemv import GemvConfig, gemv
from octavo_kernels.triton.linear.invariant_linear import invariant_linear
from octavo_kernels.triton.linear.linear_configs import LinearConfig, bucket_of, config_for
from octavo_kernels.triton.linear.skinny_gemm import SkinnyConfig, skinny_gemm
from octavo_kernels.triton.norms import rms_norm_triton
from octavo_kernels.triton.tuning.product_calls import note_call

# By default cuBLAS may round the sums of splits to 16 bits; the op promises sums in float32.
torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False


@linear.kernel(device="cuda", name="triton", preference=10, supports=declines_floats)
def linear_triton(x_TK: Tensor, weight_NK: Tensor, fused: Fused = PLAIN) -> Tensor:
    """See ``ops.linear``; the residual is overwritten and shares no memory with x. Raises ``ValueError`` for shapes
    or types that do not go together."""
    (T, K), (N, K_weight) = x_TK.shape, weight_NK.shape
    if K_weight != K or weight_NK.dtype != x_TK.dtype:
        raise ValueError(f"linear: x is {K} columns of {x_TK.dtype}, the weight {K_weight} of {weight_NK.dtype}")
    check_gates("linear", N, fused)
    if T == 0:
        return x_TK.new_empty(0, fused.width(N))
    note_call(x_TK, weight_NK, fused)
    config = None
    if x_TK.dtype != torch.float32 and not is_invariant():
        config = config_for(T, N, K, fused.activation is not None, x_TK.device)
    return run_linear(x_TK, weight_NK, fused, config)


def check_gates(op: str, N: int, fused: Fused) -> None:
    """Raise ``ValueError`` if the outputs cannot be gates and ups."""
    if fused.activation is not None and N % 2:
        raise ValueError(f"{op}: {N} outputs cannot be gates and as many ups, for activation {fused.activation!r}")


def contiguous(fused: Fused) -> Fused:
    """With a contiguous residual."""
    residual_TN = fused.residual_TN
    if residual_TN is None or residual_TN.is_contiguous():
        return fused
    return fused._replace(residual_TN=residual_TN.contiguous())


def normed(x_TK: Tensor, fused: Fused) -> tuple[Tensor, Fused]:
    """x after the norm, and what is left to fuse."""
    if fused.norm_K is None:
        return x_TK, fused
    return rms_norm_triton(x_TK, fused.norm_K, fused.eps), fused._replace(norm_K=None)


def run_linear(x_TK: Tensor, weight_NK: Tensor, fused: Fused, config: LinearConfig) -> Tensor:
    """``ops.linear`` in this configuration, or in the one order of sums of ``invariant()``."""
    x_TK, weight_NK = x_TK.contiguous(), weight_NK.contiguous()
    fused = contiguous(fused)
    if isinstance(config, GemvConfig):
        return gemv(x_TK, weight_NK, fused, config)
    fuses_norm = isinstance(config, SkinnyConfig) and config.fuses_norm and x_TK.dtype == torch.bfloat16
    if not fuses_norm:
        x_TK, fused = normed(x_TK, fused)
    if config is not None:
        block_t = config.block_t or bucket_of(max(len(x_TK), 2))
        assert block_t, f"{config} does not say how many of {len(x_TK)} rows make a tile"
        return skinny_gemm(x_TK, weight_NK, fused, config, block_t)
    multiply = invariant_linear if is_invariant() else cublas_linear
    return multiply(x_TK, weight_NK, fused)


def cublas_linear(x_TK: Tensor, weight_NK: Tensor, fused: Fused) -> Tensor:
    """The products by cuBLAS, which takes a residual, or else a bias, along; without a norm."""
    bias_N, _, _, residual_TN, activation = fused
    if is_compiling():  # there is nothing to compile in it
        y_TN = x_TK.new_empty(len(x_TK), len(weight_NK))
        return y_TN if activation is None else gate_and_mul(y_TN, activation)
    if activation is None and residual_TN is not None:
        residual_TN.addmm_(x_TK, weight_NK.T)
        return residual_TN if bias_N is None else residual_TN.add_(bias_N)
    y_TN = x_TK @ weight_NK.T if bias_N is None else torch.addmm(bias_N, x_TK, weight_NK.T)
    if activation is not None:
        y_TN = gate_and_mul(y_TN, activation)
    return y_TN if residual_TN is None else residual_TN.add_(y_TN)
