"""Short causal convolution of each channel along its sequence.

Shapes: T tokens of the step, C channels, W width.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from octavo.ops.dispatch import op
from octavo.ops.recurrent.recurrence import StateRows, wide_type


@op
def causal_conv(
    x_TC: Tensor,
    weight_WC: Tensor,
    bias_C: Tensor | None,
    state: Tensor,
    rows: StateRows,
    activation: Literal["silu"] | None = None,
) -> Tensor:
    """``act(sum over w of weight[w] * x[t - W + 1 + w] + bias)``, in float32 at least; a new tensor [T, C].

    Inputs before a sequence's first row are zeros. ``state`` is [slots, W - 1, C], of x's dtype: the last W - 1 inputs
    of each sequence, the latest last.
    """
    wide = wide_type(x_TC)
    out_TC = torch.zeros_like(x_TC)
    before = len(weight_WC) - 1
    for own, slot, is_fresh in rows.spans():
        past = torch.zeros_like(state[slot]) if is_fresh else state[slot]
        inputs = torch.cat((past.to(x_TC.dtype), x_TC[own]))
        num_rows = own.stop - own.start
        sums = torch.zeros(num_rows, x_TC.shape[1], dtype=wide, device=x_TC.device)
        for w, weight_C in enumerate(weight_WC.to(wide)):
            sums += weight_C * inputs[w : w + num_rows]
        if bias_C is not None:
            sums += bias_C
        out_TC[own] = (functional.silu(sums) if activation else sums).to(x_TC.dtype)
        for row, to in (*rows.marks(own), (own.stop - 1, slot)):
            behind = row - own.start + 1
            state[to] = inputs[behind : behind + before].to(state.dtype)
    return out_TC
