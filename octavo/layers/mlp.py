"""Feed-forward layers.

Shapes: T tokens, D model, F ffn.
"""

from __future__ import annotations

from torch import Tensor

from octavo.layers.linear import Linear
from octavo.layers.norm import RMSNorm
from octavo.layers.row_parallel import RowParallelLinear
from octavo.ops.linear import Activation


class GatedMLP:
    """``x + down(act(gate(norm(x))) * up(norm(x)))``; ``gate_up`` is the fused projection of F gates, then F ups."""

    def __init__(
        self, norm: RMSNorm, gate_up: Linear, down: Linear | RowParallelLinear, activation: Activation = "silu"
    ) -> None:
        self.norm = norm
        self.gate_up = gate_up
        self.down = down
        self.activation = activation

    def __call__(self, x_TD: Tensor) -> Tensor:
        """The next residual stream; ``x`` may be overwritten."""
        return self.down(self.gate_up(x_TD, norm=self.norm, activation=self.activation), residual=x_TD)
