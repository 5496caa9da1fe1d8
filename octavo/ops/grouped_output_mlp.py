"""What follows attention in a layer whose weights are stored in numbers of 4 or 8 bits.

Shapes: T tokens, D model, F feed-forward, A attention's outputs.
"""

from __future__ import annotations

from torch import Tensor

from octavo.ops.dispatch import op
from octavo.ops.grouped_linear import PackedGroups, grouped_linear
from octavo.ops.linear import Activation


@op
def grouped_output_mlp(
    attended_TA: Tensor,
    x_TD: Tensor,
    output: PackedGroups,
    norm_D: Tensor,
    eps: float,
    gate_up: PackedGroups,
    down: PackedGroups,
    activation: Activation,
) -> Tensor:
    """``x += output(attended)``, then ``x + down(act(gates) * ups)`` of ``gate_up(rms_norm(x))``, as three calls of
    ``grouped_linear``; x may be overwritten and returned.

    For few rows a kernel may do it at once. Weights: ``output`` [D, A], ``gate_up`` [2 F, D], ``down`` [D, F].
    """
    x_TD = grouped_linear(attended_TA, output, residual_TN=x_TD)
    inner_TF = grouped_linear(x_TD, gate_up, norm_K=norm_D, eps=eps, activation=activation)
    return grouped_linear(inner_TF, down, residual_TN=x_TD)
