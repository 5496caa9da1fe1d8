"""Linear maps, whole or with inputs that are divided among ranks.

Shapes: T tokens, K inputs (of this rank), N outputs.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from octavo import ops
from octavo.layers.norm import Norm, RMSNorm
from octavo.ops.collective import Collective
from octavo.ops.linear.linear import Activation, Fused, compose
from octavo.quant.stored.stored_weight import LinearWeight


class Linear:
    """A linear map, possibly fused from several matrices (such as query, key and value).

    Parts with the same layout form one weight; outputs of several weights are concatenated.
    """

    def __init__(self, weights: Sequence[LinearWeight], bias_N: Tensor | None = None) -> None:
        self.weights = list(weights)
        self.bias_N = bias_N

    def __call__(
        self,
        x_TK: Tensor,
        *,
        norm: RMSNorm | None = None,
        residual: Tensor | None = None,
        activation: Activation | None = None,
    ) -> Tensor:
        """``act(norm(x) @ weight.T + bias) + residual``, see ``ops.linear``; ``residual`` may be overwritten."""
        fused = self.fused(norm, residual, activation)
        return (
            self.weights[0].apply(x_TK, fused) if len(self.weights) == 1 else compose(x_TK, fused, self._side_by_side)
        )

    def fused(self, norm: RMSNorm | None, residual: Tensor | None, activation: Activation | None) -> Fused:
        """These with the bias."""
        norm_K, eps = (None, 0.0) if norm is None else (norm.weight_D, norm.eps)
        return Fused(self.bias_N, norm_K, eps, residual, activation)

    def of_normed(self, x_TK: Tensor, norm: Norm | None, activation: Activation | None = None) -> Tensor:
        """``act(norm(x) @ weight.T + bias)`` with any norm, or none."""
        if norm is None or type(norm) is RMSNorm:
            return self(x_TK, norm=norm, activation=activation)
        return self(norm(x_TK), activation=activation)

    def columns(self, x_TK: Tensor, norm: RMSNorm | None, sizes: Sequence[int]) -> list[Tensor]:
        """``norm(x) @ weight.T`` in parts of so many columns, which are not copied together where each is of one
        weight."""
        ends = set(itertools.accumulate(sizes))
        if len(self.weights) == 1 or self.bias_N is not None:
            return list(self(x_TK, norm=norm).split_with_sizes(list(sizes), dim=-1))
        h_TK = x_TK if norm is None else norm(x_TK)
        parts = [weight.apply(h_TK) for weight in self.weights]
        if not ends.issuperset(itertools.accumulate(part.shape[1] for part in parts)):
            return list(ops.concat(*parts).split_with_sizes(list(sizes), dim=-1))
        left = list(sizes)
        found: list[Tensor] = []
        for part in parts:
            own = [left.pop(0)]
            while sum(own) < part.shape[1]:
                own.append(left.pop(0))
            found += part.split_with_sizes(own, dim=-1)
        return found

    def _side_by_side(self, x_TK: Tensor) -> Tensor:
        parts = [weight.apply(x_TK) for weight in self.weights]
        y_TN = torch.empty(len(x_TK), sum(part.shape[1] for part in parts), dtype=x_TK.dtype, device=x_TK.device)
        start = 0
        for part in parts:
            ops.put_columns(part, y_TN, start, self.bias_N)
            start += part.shape[1]
        return y_TN


class RowParallelLinear:
    """A linear map of which each rank computes a part of the sum: ``partial``, whose results are added."""

    def __init__(self, partial: Linear, collective: Collective) -> None:
        self.partial = partial
        self._collective = collective

    def __call__(self, x_TK: Tensor, *, residual: Tensor | None = None) -> Tensor:
        """``x @ weight.T + bias + residual``; ``residual`` may be overwritten."""
        return self._collective.all_reduce(self.partial(x_TK), residual)
