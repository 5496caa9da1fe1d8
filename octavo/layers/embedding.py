"""Token embeddings.

Shapes: T tokens, D model, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from octavo.quant.scheme import Part
from octavo.weights.blocks import BlockTensor, dequantize


class Embedding:
    """Rows of a table, by token id. A table of blocks stays as it is; the rows asked for are made dense (float32)."""

    def __init__(self, table_VD: Part) -> None:
        self.table_VD = table_VD

    def __call__(self, token_ids_T: Tensor) -> Tensor:
        """Embeddings [T, D] of int64 ids; raise ``IndexError`` when one is not in the vocabulary."""
        table = self.table_VD
        if isinstance(table, Tensor):
            return functional.embedding(token_ids_T, table)
        ids = token_ids_T.numpy()
        if ids.size and not 0 <= ids.min() <= ids.max() < table.shape[0]:
            raise IndexError(f"token ids must be from 0 to {table.shape[0] - 1}")
        rows = BlockTensor(table.kind, (len(ids), table.shape[1]), table.data[ids])
        return torch.from_numpy(dequantize(rows))
