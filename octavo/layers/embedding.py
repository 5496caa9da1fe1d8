"""Token embeddings.

Shapes: T tokens, D model.
"""

from __future__ import annotations

from torch import Tensor

from octavo.quant.stored import LinearWeight


class Embedding:
    """Looks up rows of a table [V, D] by token id. Rows of a quantised table are dequantised on lookup."""

    def __init__(self, weight: LinearWeight) -> None:
        self.weight = weight

    def __call__(self, token_ids_T: Tensor) -> Tensor:
        """Embeddings [T, D] of int64 ids; on a CPU raises ``IndexError`` for an id outside the vocabulary."""
        return self.weight.rows(token_ids_T)
