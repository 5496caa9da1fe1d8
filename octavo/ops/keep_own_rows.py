"""Zeros in place of embeddings that another rank holds.

Shapes: T tokens, D model.
"""

from __future__ import annotations

from torch import Tensor

from octavo.ops.dispatch import op


@op
def keep_own_rows(x_TD: Tensor, token_ids_T: Tensor, first: int, count: int) -> Tensor:
    """``x``, in which the rows are zeros whose id (int64) is not from ``first`` to ``first + count``; overwrites it."""
    is_other_T = (token_ids_T < first) | (token_ids_T >= first + count)
    return x_TD.masked_fill_(is_other_T.unsqueeze(1), 0)
