"""Layer normalisation (Ba, Kiros and Hinton, arXiv 1607.06450).

Shapes: T tokens, D model.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from octavo.ops.dispatch import op


@op
def layer_norm(x_TD: Tensor, weight_D: Tensor, bias_D: Tensor, eps: float) -> Tensor:
    """``(x - mean) / sqrt(variance + eps) * weight + bias`` along the last axis; a new tensor of x's dtype.

    All of one dtype; mean and variance are taken in float32 at least.
    """
    return functional.layer_norm(x_TD, weight_D.shape, weight_D, bias_D, eps)
