"""Token ids as indices of the rows that a rank holds of a vocabulary table.

Shapes: T tokens.
"""

from __future__ import annotations

from torch import Tensor

from octavo.ops.dispatch import op_of_ids


@op_of_ids
def own_ids(token_ids_T: Tensor, first: int, count: int) -> Tensor:
    """For a rank with the rows ``first`` to ``first + count``: the index of each id among them (int64), 0 for others.

    ``token_ids`` are int64; a new tensor.
    """
    ids_T = token_ids_T - first
    return ids_T.masked_fill_((ids_T < 0) | (ids_T >= count), 0)
