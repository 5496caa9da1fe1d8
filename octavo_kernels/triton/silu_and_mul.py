"""``silu_and_mul`` for CUDA devices."""

from __future__ import annotations

from torch import Tensor

from octavo.ops.activation import silu_and_mul
from octavo_kernels.triton.gates import gate_and_mul
from octavo_kernels.triton.launch import declines_floats


@silu_and_mul.kernel(device="cuda", name="triton", preference=10, supports=declines_floats)
def silu_and_mul_triton(gate_up_T2F: Tensor) -> Tensor:
    """See ``ops.silu_and_mul``."""
    return gate_and_mul(gate_up_T2F, "silu")
