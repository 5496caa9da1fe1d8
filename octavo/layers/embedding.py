"""Token embeddings.

Shapes: T tokens, D model, V vocabulary.
"""

from __future__ import annotations

from torch import Tensor

from octavo import ops
from octavo.ops.collective import Collective
from octavo.quant.stored.stored_weight import LinearWeight


class Embedding:
    """Looks up rows of a table [V, D] by token id. Rows of a quantised table are dequantised on lookup."""

    def __init__(self, weight: LinearWeight) -> None:
        self.weight = weight

    def __call__(self, token_ids_T: Tensor) -> Tensor:
        """Embeddings [T, D] of int64 ids; on a CPU raises ``IndexError`` for an id outside the vocabulary."""
        return self.weight.rows(token_ids_T)


class VocabParallelEmbedding(Embedding):
    """An embedding whose rows are divided among ranks: this one has the rows from ``first``."""

    def __init__(self, weight: LinearWeight, first: int, num_rows: int, collective: Collective) -> None:
        super().__init__(weight)
        self._own = first, num_rows
        self._collective = collective

    def __call__(self, token_ids_T: Tensor) -> Tensor:
        """Embeddings [T, D] of int64 ids, which must be in the vocabulary."""
        rows_TD = self.weight.rows(ops.local_vocab_ids(token_ids_T, *self._own))
        return self._collective.all_reduce(ops.mask_remote_rows(rows_TD, token_ids_T, *self._own))
