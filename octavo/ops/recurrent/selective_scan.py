"""The selective scan of Mamba (arXiv 2312.00752): a recurrence with a decay for each channel and number of its state.

Shapes: T tokens of the step, C channels, K state size.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor
from torch.nn import functional

from octavo.ops.dispatch import op
from octavo.ops.recurrent.recurrence import StateRows, recur, wide_type


class ScanChannels(NamedTuple):
    """Static parameters of a layer's channels, all float32."""

    a_log_KC: Tensor
    """The natural logarithm of each number's rate of decay."""
    dt_bias_C: Tensor
    d_C: Tensor
    """Factor of the input that is added to the output."""


@op
def selective_scan(
    x_TC: Tensor, dt_TC: Tensor, b_TK: Tensor, c_TK: Tensor, channels: ScanChannels, state: Tensor, rows: StateRows
) -> Tensor:
    """The channels' outputs, a new tensor [T, C] of x's dtype. In float32 at least.

    For each channel, with its column of S::

        step = softplus(dt + dt_bias)
        S = exp(-exp(a_log) * step) * S + b * step * x
        out = S^T c + d * x

    ``state`` is [slots, 1, K, C], float32, or of fewer bits. All inputs may be some of the columns of wider tensors.
    """
    wide, a_log_KC = wide_type(x_TC), channels.a_log_KC
    (K, C), x = a_log_KC.shape, x_TC.to(wide)
    step_TC1 = functional.softplus(dt_TC.to(wide) + channels.dt_bias_C).unsqueeze(-1)
    decay_TCK = (step_TC1 * -a_log_KC.t().to(wide).exp()).exp()
    b_TCK, c_TCK = (part.to(wide).unsqueeze(1).expand(len(x), C, K) for part in (b_TK, c_TK))
    by_channel = state.squeeze(1).transpose(1, 2).unsqueeze(-1)  # each channel as a head with one value
    out_TC1 = recur(c_TCK, b_TCK, step_TC1 * x.unsqueeze(-1), decay_TCK, by_channel, rows)
    return (out_TC1.squeeze(-1) + channels.d_C.to(wide) * x).to(x_TC.dtype)
