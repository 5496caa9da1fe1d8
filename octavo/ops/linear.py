"""A dense linear map.

Shapes: T tokens, K inputs, N outputs.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from octavo.ops.dispatch import op


@op
def linear(x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None) -> Tensor:
    """``x @ weight.T + bias`` as ``[T, N]``; all of one dtype, sums in float32 at least."""
    return functional.linear(x_TK, weight_NK, bias_N)
