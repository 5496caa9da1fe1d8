"""LoRA: low-rank updates of a linear map, one adapter per group of rows (Hu et al., arXiv 2106.09685).

Shapes: T tokens, K inputs, N outputs of the full map, R rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from octavo.ops.dispatch import op
from octavo.ops.linear import linear


class LowRank(NamedTuple):
    """The update ``up @ down`` of a range of a map's outputs. All of one dtype."""

    start: int
    """First output of the range."""
    down_RK: Tensor
    up_NR: Tensor
    """Scaled; one row per output of the range."""


class RowGroup(NamedTuple):
    """Rows from ``start`` to ``end``, and their updates."""

    start: int
    end: int
    changes: Sequence[LowRank]


@op
def lora(y_TN: Tensor, x_TK: Tensor, groups: Sequence[RowGroup]) -> Tensor:
    """Add ``x @ down.T @ up.T`` to the outputs of each update; returns ``y``, overwritten.

    Rows of no group are unchanged, and a row's result does not depend on the other rows.
    """
    for first, last, changes in groups:
        for start, down_RK, up_NR in changes:
            y_TN[first:last, start : start + len(up_NR)] += linear(linear(x_TK[first:last], down_RK), up_NR)
    return y_TN
