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
