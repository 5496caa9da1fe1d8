"""``grouped_linear`` for CUDA devices: one row fused, more on tensor cores, many by cuBLAS on a dense copy.

Shapes: T rows, K inputs, N outputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.ops.grouped_linear import PackedGroups, grouped_linear
from octavo.ops.linear import Activation
from octavo_kernels.hopper.pipelined_configs import PipelinedConfig
from octavo_kernels.hopper.streamed_configs import StreamedConfig
from octavo_kernels.triton.grouped.grouped_configs import GroupedConfig, config_for, invariant_config
from octavo_kernels.triton.grouped.grouped_dense import dense
from octavo_kernels.triton.grouped.grouped_gemm import grouped_gemm
from octavo_kernels.triton.grouped.grouped_gemv import GroupedGemvConfig, grouped_gemv
from octavo_kernels.triton.grouped.grouped_product import GroupedProduct
from octavo_kernels.triton.launch import is_invariant
from octavo_kernels.triton.linear.linear import cublas_linear
from octavo_kernels.triton.norms import rms_norm_triton
from octavo_kernels.triton.tuning.product_calls import note_call

FLOATS = (torch.bfloat16, torch.float16)


def declines_grouped(dtype: torch.dtype) -> str | None:
    """Why kernels for packed groups cannot take activations of this type, or ``None``."""
    return None if dtype in FLOATS else f"tensor cores take {', '.join(map(str, FLOATS))}; this is {dtype}"


@grouped_linear.kernel(device="cuda", name="triton", preference=10, supports=declines_grouped)
def grouped_linear_triton(
    x_TK: Tensor,
    packed: PackedGroups,
    bias_N: Tensor | None = None,
    norm_K: Tensor | None = None,
    eps: float = 0.0,
    residual_TN: Tensor | None = None,
    activation: Activation | None = None,
) -> Tensor:
    """See ``ops.grouped_linear``; the residual is overwritten and shares no memory with x. Raises ``ValueError`` for
    shapes that do not go together."""
    (T, K), (N, K_weight) = x_TK.shape, packed.shape
    if K_weight != K:
        raise ValueError(f"grouped_linear: x has {K} columns, the weight {K_weight}")
    if activation is not None and N % 2:
        raise ValueError(f"grouped_linear: {N} outputs cannot be gates and as many ups, for activation {activation!r}")
    if T == 0:
        return x_TK.new_empty(0, N if activation is None else N // 2)
    note_call(x_TK, packed, bias_N, norm_K, residual_TN, activation)
    if is_invariant():
        config: GroupedConfig
        config, in_turn = invariant_config(T, packed, activation is not None)
    else:
        product = GroupedProduct.of(packed, activation is not None, x_TK.dtype)
        config, in_turn = config_for(T, product, x_TK.device), False
    return run_grouped(x_TK, packed, bias_N, norm_K, eps, residual_TN, activation, config, in_turn)


def run_grouped(
    x_TK: Tensor,
    packed: PackedGroups,
    bias_N: Tensor | None,
    norm_K: Tensor | None,
    eps: float,
    residual_TN: Tensor | None,
    activation: Activation | None,
    config: GroupedConfig,
    splits_in_turn: bool = False,
) -> Tensor:
    """``ops.grouped_linear`` in this configuration, whose kernel takes the product."""
    x_TK = x_TK.contiguous()
    residual_TN = None if residual_TN is None else residual_TN.contiguous()
    is_few = isinstance(config, StreamedConfig | GroupedGemvConfig)
    # In float16 the product of x and the norm's weight could overflow.
    fuses_norm = is_few and len(x_TK) == 1 and packed.order_K is None and x_TK.dtype == torch.bfloat16
    if norm_K is not None and not fuses_norm:
        x_TK, norm_K = rms_norm_triton(x_TK, norm_K, eps), None
    if packed.order_K is not None:
        x_TK = x_TK.index_select(1, packed.order_K)
    if isinstance(config, StreamedConfig):
        from octavo_kernels.hopper.streamed_gemv import streamed_gemv

        return streamed_gemv(x_TK, packed, bias_N, norm_K, eps, residual_TN, activation, config)
    if isinstance(config, PipelinedConfig):
        from octavo_kernels.hopper.pipelined_gemm import pipelined_gemm

        return pipelined_gemm(x_TK, packed, bias_N, residual_TN, activation, config)
    if isinstance(config, GroupedGemvConfig):
        return grouped_gemv(x_TK, packed, bias_N, norm_K, eps, residual_TN, activation, config)
    if config is not None:
        return grouped_gemm(x_TK, packed, bias_N, residual_TN, activation, config, splits_in_turn)
    return cublas_linear(x_TK, dense(packed, x_TK.dtype), bias_N, residual_TN, activation)
