"""Rows side by side.

Shapes: T tokens, M columns of a part, N columns of the result.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.ops.dispatch import op


@op
def concat(first_TM: Tensor, *others: Tensor) -> Tensor:
    """The columns of all parts, a new tensor [T, N]; all of one dtype."""
    return torch.cat((first_TM, *others), dim=1)
