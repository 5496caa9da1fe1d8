"""Normalisation.

Shapes: T tokens, D model.
"""

from __future__ import annotations

from torch import Tensor

from octavo import ops


class RMSNorm:
    """Root-mean-square normalisation with a weight for each element."""

    def __init__(self, weight_D: Tensor, eps: float) -> None:
        self.weight_D = weight_D
        self.eps = eps

    def __call__(self, x_TD: Tensor) -> Tensor:
        return ops.rms_norm(x_TD, self.weight_D, self.eps)


class LayerNorm:
    """Layer normalisation with a weight and a bias for each element."""

    def __init__(self, weight_D: Tensor, bias_D: Tensor, eps: float) -> None:
        self.weight_D = weight_D
        self.bias_D = bias_D
        self.eps = eps

    def __call__(self, x_TD: Tensor) -> Tensor:
        return ops.layer_norm(x_TD, self.weight_D, self.bias_D, self.eps)
