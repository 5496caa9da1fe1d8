"""``gated_conv`` for CUDA devices: the gates multiply what the convolution reads and writes."""

from __future__ import annotations

from torch import Tensor

from octavo.ops.gated_conv import gated_conv
from octavo.ops.recurrence import StateRows
from octavo_kernels.triton.launch import declines_floats
from octavo_kernels.triton.recurrent.causal_conv import convolve


@gated_conv.kernel(device="cuda", name="triton", preference=10, supports=declines_floats)
def gated_conv_triton(
    bcx_T3C: Tensor, weight_WC: Tensor, bias_C: Tensor | None, state: Tensor, rows: StateRows
) -> Tensor:
    """See ``ops.gated_conv``."""
    bcx_T3C = bcx_T3C if bcx_T3C.stride(1) == 1 else bcx_T3C.contiguous()
    b_TC, c_TC, x_TC = bcx_T3C.chunk(3, dim=-1)
    return convolve((x_TC, b_TC, c_TC), weight_WC, bias_C, state, rows, None)
