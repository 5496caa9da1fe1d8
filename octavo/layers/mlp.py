"""Feed-forward layers.

Shapes: T tokens, D model, F ffn.
"""

from __future__ import annotations

from torch import Tensor

from octavo import ops
from octavo.layers.linear import Linear


class SwiGLU:
    """``down(silu(gate(x)) * up(x))``; ``gate_up`` computes the F gates and then the F ups."""

    def __init__(self, gate_up: Linear, down: Linear) -> None:
        self.gate_up = gate_up
        self.down = down

    def __call__(self, x_TD: Tensor) -> Tensor:
        return self.down(ops.silu_and_mul(self.gate_up(x_TD)))
