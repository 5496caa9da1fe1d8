"""``gated_conv`` in float32: the gates multiply what the convolution reads and writes."""

from __future__ import annotations

from torch import Tensor

from octavo.ops.gated_conv import gated_conv
from octavo.ops.recurrence import StateRows
from octavo_kernels.cpu.recurrent.causal_conv import convolve
from octavo_kernels.cpu.recurrent.recurrence import rows_of
from octavo_kernels.cpu.tensors import declines_activations


@gated_conv.kernel(device="cpu", name="numba", preference=10, supports=declines_activations)
def gated_conv_numba(
    bcx_T3C: Tensor, weight_WC: Tensor, bias_C: Tensor | None, state: Tensor, rows: StateRows
) -> Tensor:
    """See ``ops.gated_conv``. Raises ``IndexError`` when rows or slots do not fit the tensors."""
    b_TC, c_TC, x_TC = rows_of(bcx_T3C).chunk(3, dim=-1)
    return convolve((x_TC, b_TC, c_TC), weight_WC, bias_C, state, rows, None)
