"""Concatenates the results of several linear maps along columns.

Shapes: T tokens, M columns of a part, N columns of the result.
"""

from __future__ import annotations

from torch import Tensor

from octavo.ops.dispatch import op


@op
def put_columns(part_TM: Tensor, out_TN: Tensor, start: int, bias_N: Tensor | None = None) -> None:
    """Set the columns of ``out`` from ``start`` on to ``part`` plus these columns' bias; all of one dtype."""
    end = start + part_TM.shape[1]
    out_TN[:, start:end] = part_TM if bias_N is None else part_TM + bias_N[start:end]
