"""Normalisation.

Shapes: T tokens, D model.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from octavo import ops
from octavo.ops.collective import Collective


class RMSNorm:
    """Root-mean-square normalisation with a weight for each element; a residual is added to the result."""

    def __init__(self, weight_D: Tensor, eps: float) -> None:
        self.weight_D = weight_D
        self.eps = eps

    def __call__(self, x_TD: Tensor, residual_TD: Tensor | None = None) -> Tensor:
        return ops.rms_norm(x_TD, self.weight_D, self.eps, residual_TD)


class ParallelRMSNorm(RMSNorm):
    """An RMSNorm over elements that are divided among ranks.

    Ranks that hold the same elements hold them equally often, so the mean over all ranks is the mean of the elements.
    """

    def __init__(self, weight_D: Tensor, eps: float, collective: Collective) -> None:
        super().__init__(weight_D, eps)
        self._collective = collective

    def __call__(self, x_TD: Tensor, residual_TD: Tensor | None = None) -> Tensor:
        wide_TD = x_TD.float()
        mean_T1 = self._collective.all_reduce(wide_TD.square().mean(dim=1, keepdim=True)) / self._collective.size
        normed_TD = wide_TD * torch.rsqrt(mean_T1 + self.eps) * self.weight_D.float()
        return (normed_TD if residual_TD is None else normed_TD + residual_TD).to(x_TD.dtype)


class GatedRMSNorm(RMSNorm):
    """An RMSNorm whose result is multiplied by the sigmoids of a map of it through few numbers."""

    def __init__(self, norm: RMSNorm, down: Callable[[Tensor], Tensor], up: Callable[[Tensor], Tensor]) -> None:
        super().__init__(norm.weight_D, norm.eps)
        self.down, self.up = down, up

    def __call__(self, x_TD: Tensor, residual_TD: Tensor | None = None) -> Tensor:
        normed_TD = super().__call__(x_TD)
        inner_TR = self.down(normed_TD)
        gates_TD = self.up(ops.sigmoid_and_mul(inner_TR, inner_TR))
        gated_TD = ops.sigmoid_and_mul(gates_TD, normed_TD)
        return gated_TD if residual_TD is None else gated_TD.add_(residual_TD)


class LayerNorm:
    """Layer normalisation with a weight and a bias for each element; a residual is added to the result."""

    def __init__(self, weight_D: Tensor, bias_D: Tensor, eps: float) -> None:
        self.weight_D = weight_D
        self.bias_D = bias_D
        self.eps = eps

    def __call__(self, x_TD: Tensor, residual_TD: Tensor | None = None) -> Tensor:
        normed_TD = ops.layer_norm(x_TD, self.weight_D, self.bias_D, self.eps)
        return normed_TD if residual_TD is None else normed_TD.add_(residual_TD)


Norm = RMSNorm | LayerNorm
