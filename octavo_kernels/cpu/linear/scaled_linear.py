"""``scaled_linear``: the kernel of ``linear``, which widens the 8-bit numbers to float32 in registers."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.ops.linear.linear import PLAIN, Fused
from octavo.ops.linear.scaled_linear import LANES, ScaledValues, scaled_linear
from octavo_kernels.cpu.linear.linear import WeightRows, multiply_rows
from octavo_kernels.cpu.tensors import declines_activations, whole_vectors
from octavo_kernels.cpu.vector_ir import E4M3


@scaled_linear.kernel(device="cpu", name="numba", preference=10, supports=declines_activations)
def scaled_linear_numba(x_TK: Tensor, weight: ScaledValues, fused: Fused = PLAIN) -> Tensor:
    """See ``ops.scaled_linear``."""
    N, K = weight.values_NK.shape
    if weight.group % LANES and weight.group < K:
        raise ValueError(f"scaled_linear: groups of {weight.group} inputs; they must be multiples of {LANES}")
    if weight.values_NK.dtype != torch.float8_e4m3fn:
        raise ValueError(f"scaled_linear: a weight of {weight.values_NK.dtype}; it must be float8_e4m3fn")
    values = weight.values_NK.view(torch.uint8)
    rows = WeightRows(E4M3, whole_vectors(values), (N, K), weight.scales_NG.contiguous(), weight.group)
    return multiply_rows("scaled_linear", x_TK, rows, fused)
