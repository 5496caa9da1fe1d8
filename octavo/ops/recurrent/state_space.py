"""The state-space recurrence of Mamba-2 (arXiv 2405.21060).

Shapes: T tokens of the step, N heads, P numbers of a head, G groups of heads, K state size, C = N P + 2 G K.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from torch import Tensor
from torch.nn import functional

from octavo.ops.dispatch import op
from octavo.ops.recurrent.recurrence import StateRows, recur, wide_type


class StateSpaceHeads(NamedTuple):
    """Static parameters of a layer's heads."""

    num_heads: int
    head_dim: int
    num_groups: int
    """Groups of N / num_groups neighbouring heads, which share b and c."""
    state_size: int
    a_log_N: Tensor
    """float32: the natural logarithm of each head's rate of decay."""
    dt_bias_N: Tensor
    """float32"""
    d_N: Tensor
    """float32: factor of the input that is added to the output."""
    dt_limits: tuple[float, float] = (0.0, math.inf)
    """Smallest and largest time step."""

    @property
    def sizes(self) -> list[int]:
        """Number of columns of x, b and c in a row."""
        shared = self.num_groups * self.state_size
        return [self.num_heads * self.head_dim, shared, shared]


@op
def state_space(xbc_TC: Tensor, dt_TN: Tensor, heads: StateSpaceHeads, state: Tensor, rows: StateRows) -> Tensor:
    """The heads' outputs, a new tensor [T, N * P] of xbc's dtype. In float32 at least.

    ``xbc`` holds x, b and c after their convolution. For each head::

        step = clamp(softplus(dt + dt_bias), dt_limits)
        S = exp(-exp(a_log) * step) * S + b (step * x)^T
        out = S^T c + d * x

    ``state`` is [slots, N, K, P], float32, or of fewer bits. All inputs may be some of the columns of wider tensors.
    """
    T, wide, N, G = len(xbc_TC), wide_type(xbc_TC), heads.num_heads, heads.num_groups
    x, b, c = xbc_TC.to(wide).split_with_sizes(heads.sizes, dim=-1)
    x_TNP = x.reshape(T, N, heads.head_dim)
    b_TNK, c_TNK = (part.reshape(T, G, heads.state_size).repeat_interleave(N // G, dim=1) for part in (b, c))
    step_TN1 = functional.softplus(dt_TN.to(wide) + heads.dt_bias_N).clamp(*heads.dt_limits).unsqueeze(-1)
    decay_TN1 = (-heads.a_log_N.to(wide).exp().unsqueeze(-1) * step_TN1).exp()
    out_TNP = recur(c_TNK, b_TNK, step_TN1 * x_TNP, decay_TN1, state, rows)
    return (out_TNP + heads.d_N.to(wide).unsqueeze(-1) * x_TNP).flatten(1).to(xbc_TC.dtype)
