"""Token embeddings.

Shapes: T tokens, D model, V vocabulary.
"""

from __future__ import annotations

from torch import Tensor

from octavo import ops
from octavo.ops.block_linear import PackedBlocks


class Embedding:
    """Rows of a table, by token id. A table in packed blocks stays so; the rows asked for are made dense (float32)."""

    def __init__(self, table_VD: Tensor | PackedBlocks) -> None:
        self.table_VD = table_VD

    def __call__(self, token_ids_T: Tensor) -> Tensor:
        """Embeddings [T, D] of int64 ids; on a CPU raise ``IndexError`` when one is not in the vocabulary."""
        if isinstance(self.table_VD, PackedBlocks):
            return ops.block_embedding(token_ids_T, self.table_VD)
        return ops.embedding(token_ids_T, self.table_VD)
