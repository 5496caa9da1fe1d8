"""The short convolution with input and output gates of LFM2 (Liquid AI, 2025).

Shapes: T tokens of the step, C channels, W width.
"""

from __future__ import annotations

from torch import Tensor

from octavo.ops.dispatch import op
from octavo.ops.recurrent.causal_conv import causal_conv
from octavo.ops.recurrent.recurrence import StateRows


@op
def gated_conv(bcx_T3C: Tensor, weight_WC: Tensor, bias_C: Tensor | None, state: Tensor, rows: StateRows) -> Tensor:
    """``c * conv(b * x)`` of rows that hold C numbers of b, of c and of x; a new tensor [T, C].

    ``state`` is that of ``causal_conv``, whose inputs are ``b * x``, rounded to its dtype.
    """
    b_TC, c_TC, x_TC = bcx_T3C.chunk(3, dim=-1)
    return c_TC * causal_conv(b_TC * x_TC, weight_WC, bias_C, state, rows)
