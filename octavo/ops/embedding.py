"""Embedding lookup.

Shapes: T tokens, D model, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from octavo.ops.dispatch import op_of_ids


@op_of_ids
def embedding(token_ids_T: Tensor, table_VD: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Row ``token_ids[t]`` (int64) of the table for each t; a new tensor [T, D] in ``dtype``, or else the table's.

    Another dtype than the table's must be float32.
    Ids that are not in the table raise ``IndexError`` on a CPU.
    """
    return functional.embedding(token_ids_T, table_VD).to(dtype or table_VD.dtype)
