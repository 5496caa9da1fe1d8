"""What follows attention in a layer: its output projection, and the feed-forward layer.

Shapes: T tokens, D model, A attention's outputs.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from octavo import ops
from octavo.layers.linear import Linear, RowParallelLinear
from octavo.layers.mlp import MLP
from octavo.layers.norm import RMSNorm
from octavo.ops.linear.grouped_linear import PackedGroups
from octavo.quant.stored.packed import GroupedWeight


def output_mlp(
    output: Linear | RowParallelLinear, mlp: Callable[[Tensor], Tensor], attended_TA: Tensor, x_TD: Tensor
) -> Tensor:
    """``mlp(output(attended, residual=x))``, the next residual stream; ``x`` may be overwritten.

    One op where all weights are packed in groups and nothing is added to their results.
    """
    if isinstance(mlp, MLP) and isinstance(mlp.activation, str) and type(mlp.before) is RMSNorm and mlp.after is None:
        own, gate_up, down = (_plain(part) for part in (output, mlp.up, mlp.down))
        if own is not None and gate_up is not None and down is not None:
            norm = mlp.before
            return ops.grouped_output_mlp(
                attended_TA, x_TD, own, norm.weight_D, norm.eps, gate_up, down, mlp.activation
            )
    return mlp(output(attended_TA, residual=x_TD))


def _plain(linear: Linear | RowParallelLinear) -> PackedGroups | None:
    """The weight of a linear map that is packed in groups, without bias, adapters or other ranks' parts."""
    if type(linear) is not Linear or linear.bias_N is not None or len(linear.weights) != 1:
        return None
    weight = linear.weights[0]
    return weight.packed if isinstance(weight, GroupedWeight) else None
