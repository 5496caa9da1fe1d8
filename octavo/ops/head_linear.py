"""A separate linear map for each head.

Shapes: T tokens, N heads, K inputs, O outputs.
"""

from __future__ import annotations

from torch import Tensor

from octavo.ops.dispatch import op


@op
def head_linear(x_TNK: Tensor, weight_NOK: Tensor) -> Tensor:
    """``x[:, n] @ weight[n].T`` for each head n, all of one dtype; a new tensor [T, N, O]."""
    return (x_TNK.transpose(0, 1) @ weight_NOK.mT).transpose(0, 1)
