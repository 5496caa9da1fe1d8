"""Low-rank changes of a linear map, another one for each group of rows (Hu et al., arXiv 2106.09685).

Shapes: T tokens, K inputs, N outputs of the whole map, R rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from octavo.ops.dispatch import op
from octavo.ops.linear import linear


class LowRank(NamedTuple):
    """A change of some of a map's outputs: ``up @ down``. All of one dtype."""

    start: int
    """The first of the outputs that are changed."""
    down_RK: Tensor
    up_NR: Tensor
    """Scaled; it has as many rows as outputs are changed."""


class RowGroup(NamedTuple):
    """Rows from ``start`` to ``end``, and what is changed for them."""

    start: int
    end: int
    changes: Sequence[LowRank]


@op
def lora(y_TN: Tensor, x_TK: Tensor, groups: Sequence[RowGroup]) -> Tensor:
    """Add ``x @ down.T @ up.T`` to the outputs that each change is about; ``y``, overwritten.

    Rows of no group are left alone, and a row's numbers do not depend on the other rows.
    """
    for first, last, changes in groups:
        for start, down_RK, up_NR in changes:
            y_TN[first:last, start : start + len(up_NR)] += linear(linear(x_TK[first:last], down_RK), up_NR)
    return y_TN
