"""The activation of a feed-forward layer without gates (Hendrycks and Gimpel, arXiv 1606.08415).

Shapes: T tokens, F ffn.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.ops import elementwise
from octavo.ops.dispatch import op


@op
def gelu(x_TF: Tensor, approximate: bool) -> Tensor:
    """``x * Phi(x)``, or its tanh form with ``approximate``; in float32 at least; a new tensor of x's dtype."""
    wide_TF = x_TF.to(torch.promote_types(x_TF.dtype, torch.float32))
    return elementwise.gelu(wide_TF, approximate).to(x_TF.dtype)
