"""Embedding lookup.

Shapes: T tokens, D model, V vocabulary.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from octavo.ops.dispatch import op


@op
def embedding(token_ids_T: Tensor, table_VD: Tensor) -> Tensor:
    """Row ``token_ids[t]`` (int64) of the table for each t; a new tensor [T, D].

    Ids that are not in the table raise ``IndexError`` on a CPU.
    """
    return functional.embedding(token_ids_T, table_VD)
