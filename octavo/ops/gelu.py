"""The activation of a feed-forward layer without gates (Hendrycks and Gimpel, arXiv 1606.08415).

Shapes: T tokens, F ffn.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from octavo.ops.dispatch import op


@op
def gelu(x_TF: Tensor, approximate: bool) -> Tensor:
    """``x * Phi(x)``, or its tanh form with ``approximate``; in float32 at least; a new tensor of x's dtype."""
    return functional.gelu(x_TF, approximate="tanh" if approximate else "none")
