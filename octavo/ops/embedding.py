"""Lookups of token ids in tables, whole or a rank's part."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from octavo.ops.dispatch import op, op_of_ids

# ---- embedding: Embedding lookup. Shapes: T tokens, D model, V vocabulary.


@op_of_ids
def embedding(token_ids_T: Tensor, table_VD: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Row ``token_ids[t]`` (int64) of the table for each t; a new tensor [T, D] in ``dtype``, or else the table's.

    Another dtype than the table's must be float32.
    Ids that are not in the table raise ``IndexError`` on a CPU.
    """
    return functional.embedding(token_ids_T, table_VD).to(dtype or table_VD.dtype)


# ---- local_vocab_ids: Token ids as indices of the rows that a rank holds of a vocabulary table. Shapes: T tokens.


@op_of_ids
def local_vocab_ids(token_ids_T: Tensor, first: int, count: int) -> Tensor:
    """For a rank with the rows ``first`` to ``first + count``: the index of each id among them (int64), 0 for others.

    ``token_ids`` are int64; a new tensor.
    """
    ids_T = token_ids_T - first
    return ids_T.masked_fill_((ids_T < 0) | (ids_T >= count), 0)


# ---- mask_remote_rows: Zeros in place of embeddings that another rank holds. Shapes: T tokens, D model.


@op
def mask_remote_rows(x_TD: Tensor, token_ids_T: Tensor, first: int, count: int) -> Tensor:
    """``x``, in which the rows are zeros whose id (int64) is not from ``first`` to ``first + count``; overwrites it."""
    is_other_T = (token_ids_T < first) | (token_ids_T >= first + count)
    return x_TD.masked_fill_(is_other_T.unsqueeze(1), 0)
