"""``grouped_linear`` for CUDA devices: one row fused, more on tensor cores, many by cuBLAS on a dense copy.

Shapes: T rows, K inputs, N outputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.ops.linear.grouped_linear import PackedGroups, grouped_linear
from octavo.ops.linear.linear import PLAIN, Fused
from octavo_kernels.hopper.pipelined_configs import PipelinedConfig
from octavo_kernels.hopper.streamed_configs import StreamedConfig
from octavo_kernels.triton.grouped.grouped_configs import GroupedConfig, config_for, invariant_config
from octavo_kernels.triton.grouped.grouped_dense import dense
from octavo_kernels.triton.grouped.grouped_gemm import grouped_gemm
from octavo_kernels.triton.grouped.grouped_gemv import GroupedGemvConfig, grouped_gemv
from octavo_kernels.triton.grouped.grouped_product import GroupedProduct
from octavo_kernels.triton.launch import is_invariant
from octavo_kernels.triton.linear.linear import check_gates, contiguous, cublas_linear, normed
from octavo_kernels.triton.tuning.product_calls import note_call

FLOATS = (torch.bfloat16, torch.float16)


def declines_grouped(dtype: torch.dtype) -> str | None:
    """Why kernels for packed groups cannot take activations of this type, or ``None``."""
    return None if dtype in FLOATS else f"tensor cores take {', '.join(map(str, FLOATS))}; this is {dtype}"


@grouped_linear.kernel(device="cuda", name="triton", preference=10, supports=declines_grouped)
def grouped_linear_triton(x_TK: Tensor, packed: PackedGroups, fused: Fused = PLAIN) -> Tensor:
    """See ``ops.grouped_linear``; the residual is overwritten and shares no memory with x. Raises ``ValueError`` for
    shapes that do not go together."""
    (T, K), (N, K_weight) = x_TK.shape, packed.shape
    if K_weight != K:
        raise ValueError(f"grouped_linear: x has {K} columns, the weight {K_weight}")
    check_gates("grouped_linear", N, fused)
    if T == 0:
        return x_TK.new_empty(0, fused.width(N))
    note_call(x_TK, packed, fused)
    if is_invariant():
        config: GroupedConfig
        config, in_turn = invariant_config(T, packed, fused.activation is not None)
    else:
        product = GroupedProduct.of(packed, fused.activation is not None, x_TK.dtype)
        config, in_turn = config_for(T, product, x_TK.device), False
    return run_grouped(x_TK, packed, fused, config, in_turn)


def run_grouped(
    x_TK: Tensor, packed: PackedGroups, fused: Fused, config: GroupedConfig, splits_in_turn: bool = False
) -> Tensor:
    """``ops.grouped_linear`` in this configuration, whose kernel takes the product."""
    x_TK, fused = x_TK.contiguous(), contiguous(fused)
    is_few = isinstance(config, StreamedConfig | GroupedGemvConfig)
    # In float16 the product of x and the norm's weight could overflow.
    fuses_norm = is_few and len(x_TK) == 1 and packed.order_K is None and x_TK.dtype == torch.bfloat16
    if not fuses_norm:
        x_TK, fused = normed(x_TK, fused)
    if packed.order_K is not None:
        x_TK = x_TK.index_select(1, packed.order_K)
    if isinstance(config, StreamedConfig):
        from octavo_kernels.hopper.streamed_gemv import streamed_gemv

        return streamed_gemv(x_TK, packed, fused, config)
    if isinstance(config, PipelinedConfig):
        from octavo_kernels.hopper.pipelined_gemm import pipelined_gemm

        return pipelined_gemm(x_TK, packed, fused, config)
    if isinstance(config, GroupedGemvConfig):
        return grouped_gemv(x_TK, packed, fused, config)
    if config is not None:
        return grouped_gemm(x_TK, packed, fused, config, splits_in_turn)
    return cublas_linear(x_TK, dense(packed, x_TK.dtype), fused)
