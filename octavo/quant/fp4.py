"""Reads ``Float4Stored`` of NVFP4 and MXFP4 as compressed-tensors and ModelOpt name their tensors.

Shapes: K inputs, N outputs.
"""

from __future__ import annotations

import torch

from octavo.errors import CheckpointError
from octavo.quant.float4 import Float4Stored
from octavo.quant.fp8 import leave_out_activation_scales
from octavo.quant.tensors import Tensors

NVFP4_GROUP, MXFP4_GROUP = 16, 32


def read_nvfp4(
    name: str, shape: tuple[int, int], tensors: Tensors, weight: str, tensor_scale: str, divides: bool
) -> Float4Stored:
    """Module ``name``, whose tensors are ``weight``, ``weight_scale`` and ``tensor_scale``."""
    N, K = shape
    _check_groups(name, K, NVFP4_GROUP)
    codes = tensors.typed(f"{name}.{weight}", (N, K // 2), torch.uint8)
    group_scales = tensors.typed(f"{name}.weight_scale", (N, K // NVFP4_GROUP), torch.float8_e4m3fn)
    tensors.check(torch.isfinite(group_scales.float()), f"tensor {name}.weight_scale has scales that are not numbers")
    scale = tensors.scales(f"{name}.{tensor_scale}", (1,), (), (1, 1)).reshape(1)
    tensors.check(scale > 0, f"tensor {name}.{tensor_scale} is not positive")
    leave_out_activation_scales(name, tensors)
    return Float4Stored(codes, group_scales, scale.expand(N), divides)


def read_mxfp4(name: str, shape: tuple[int, int], tensors: Tensors, weight: str) -> Float4Stored:
    """Module ``name``, whose tensors are ``weight`` and ``weight_scale``."""
    N, K = shape
    _check_groups(name, K, MXFP4_GROUP)
    codes = tensors.typed(f"{name}.{weight}", (N, K // 2), torch.uint8)
    exponents = tensors.typed(f"{name}.weight_scale", (N, K // MXFP4_GROUP), torch.uint8, torch.float8_e8m0fnu)
    leave_out_activation_scales(name, tensors)
    return Float4Stored(codes, exponents.view(torch.uint8))


def _check_groups(name: str, num_inputs: int, group: int) -> None:
    if num_inputs % group:
        raise CheckpointError(f"module {name} has {num_inputs} inputs, which are not whole groups of {group}")
