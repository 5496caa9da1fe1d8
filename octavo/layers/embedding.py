"""Token embeddings.

Shapes: T tokens, D model.
"""

from __future__ import annotations

from torch import Tensor

from octavo.quant.stored import LinearWeight


class Embedding:
    """Rows of a table [V, D], by token id. In a packed table the rows asked for are made dense."""

    def __init__(self, weight: LinearWeight) -> None:
        self.weight = weight

    def __call__(self, token_ids_T: Tensor) -> Tensor:
        """Embeddings [T, D] of int64 ids; on a CPU raise ``IndexError`` when one is not in the vocabulary."""
        return self.weight.rows(token_ids_T)
