"""Feed-forward layers.

Shapes: T tokens, D model, F ffn.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from octavo import ops
from octavo.layers.linear import Linear, RowParallelLinear
from octavo.layers.norm import Norm
from octavo.ops.linear.linear import Activation
from octavo.ops.moe import CappedSwish, ClampedSwish

PlainActivation = Callable[[Tensor], Tensor]
"""An elementwise function [T, F], which may overwrite its argument."""


def relu(x_TF: Tensor) -> Tensor:
    """``max(x, 0)``."""
    return x_TF.relu_()


def silu(x_TF: Tensor) -> Tensor:
    return torch.nn.functional.silu(x_TF)


def squared_relu(x_TF: Tensor) -> Tensor:
    """``max(x, 0)`` squared (arXiv 2109.08668)."""
    return ops.squared_relu(x_TF)


def gelu(x_TF: Tensor) -> Tensor:
    return ops.gelu(x_TF, False)


def gelu_tanh(x_TF: Tensor) -> Tensor:
    return ops.gelu(x_TF, True)


class XIELU:
    """``beta x + positive x^2`` above zero, ``beta x + negative (e^x - 1 - x)`` below (xIELU, arXiv 2411.13010)."""

    def __init__(self, positive: float, negative: float, beta: float, eps: float) -> None:
        self.positive, self.negative, self.beta, self.eps = positive, negative, beta, eps

    def __call__(self, x_TF: Tensor) -> Tensor:
        x = x_TF.float()
        below = (x.clamp(max=self.eps).exp() - 1 - x) * self.negative
        return (x * self.beta + (x * x * self.positive).where(x > 0, below)).to(x_TF.dtype)


@dataclass(eq=False)
class MLP:
    """``x + after(down(act(up(before(x)))))``: any norms, or none, and gates or none.

    With the name of an activation, or limits of one, ``up`` is the fused projection to F gates, then F ups:
    ``act(gate) * up``.
    """

    before: Norm | None
    up: Linear
    down: Linear | RowParallelLinear
    activation: Activation | CappedSwish | ClampedSwish | PlainActivation
    after: Norm | None

    def __call__(self, x_TD: Tensor, of: Tensor | None = None) -> Tensor:
        """The next residual stream; ``x`` may be overwritten. With ``of``, that is what the layer computes, and ``x``
        what the result is added to."""
        h_TF = self._inner(x_TD if of is None else of)
        return self.down(h_TF, residual=x_TD) if self.after is None else self.after(self.down(h_TF), x_TD)

    def normed_sum(self, x_TD: Tensor) -> Tensor:
        """``after(x + down(act(up(before(x)))))``, as encoders compute it; ``x`` may be overwritten."""
        assert self.after is not None
        return self.after(self.down(self._inner(x_TD), residual=x_TD))

    def _inner(self, x_TD: Tensor) -> Tensor:
        if isinstance(self.activation, str):
            return self.up.of_normed(x_TD, self.before, self.activation)
        return self.activation(self.up.of_normed(x_TD, self.before))
