"""Linear maps whose inputs are divided among ranks.

Shapes: T tokens, K inputs of this rank, N outputs.
"""

from __future__ import annotations

from torch import Tensor

from octavo.layers.linear import Linear
from octavo.ops.collective import Collective


class RowParallelLinear:
    """A linear map of which each rank computes a part of the sum: ``partial``, whose results are added."""

    def __init__(self, partial: Linear, collective: Collective) -> None:
        self.partial = partial
        self._collective = collective

    def __call__(self, x_TK: Tensor, *, residual: Tensor | None = None) -> Tensor:
        """``x @ weight.T + bias + residual``; ``residual`` may be overwritten."""
        return self._collective.all_reduce(self.partial(x_TK), residual)
