"""``gelu_and_mul`` for CUDA devices."""

from __future__ import annotations

from torch import Tensor

from octavo.ops.activation import gelu_and_mul
from octavo_kernels.triton.gates import gate_and_mul
from octavo_kernels.triton.launch import declines_floats


@gelu_and_mul.kernel(device="cuda", name="triton", preference=10, supports=declines_floats)
def gelu_and_mul_triton(gate_up_T2F: Tensor, approximate: bool) -> Tensor:
    """See ``ops.gelu_and_mul``."""
    return gate_and_mul(gate_up_T2F, "gelu_tanh" if approximate else "gelu")
