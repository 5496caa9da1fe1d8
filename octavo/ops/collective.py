"""Collective operations of tensor parallelism: what the ranks of a model exchange in a step.

Every rank calls the same operations in the same order, with tensors of equal shapes, and gets the same bits. Sums are
computed in float32, in the order of the ranks.

Shapes: T tokens, D model, W ranks.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Collective(Protocol):
    """One rank's access to the others."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int:
        """Number of ranks W."""
        ...

    def all_reduce(self, x_TD: Tensor, residual_TD: Tensor | None = None) -> Tensor:
        """The sum of all ranks' ``x``, plus ``residual``, which is equal on all ranks; either may be overwritten."""
        ...

    def all_gather(self, x: Tensor) -> Tensor:
        """All ranks' ``x``, of equal shapes and types: a new tensor [W, ...]."""
        ...


class SingleRank:
    """The collective of a model that is on one device."""

    rank = 0
    size = 1

    def all_reduce(self, x_TD: Tensor, residual_TD: Tensor | None = None) -> Tensor:
        """See ``Collective``."""
        return x_TD if residual_TD is None else residual_TD.add_(x_TD)

    def all_gather(self, x: Tensor) -> Tensor:
        """See ``Collective``."""
        return x.unsqueeze(0)


SINGLE_RANK = SingleRank()
