"""Normalisation of rows."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from octavo.ops.dispatch import op

# ---- rms_norm: Root-mean-square normalisation (Zhang and Sennrich, arXiv 1910.07467). Shapes: T tokens, D model.


@op
def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float, residual_TD: Tensor | None = None) -> Tensor:
    """``x / sqrt(mean(x^2) + eps) * weight + residual`` along the last axis, in float32 at least.

    Returns a new tensor of x's dtype. The residual, if given, has x's shape and dtype.
    """
    x = x_TD.to(torch.promote_types(x_TD.dtype, torch.float32))
    scale = torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps)
    normed_TD = x * scale * weight_D
    return (normed_TD if residual_TD is None else normed_TD + residual_TD).to(x_TD.dtype)


# ---- layer_norm: Layer normalisation (Ba, Kiros and Hinton, arXiv 1607.06450). Shapes: T tokens, D model.


@op
def layer_norm(x_TD: Tensor, weight_D: Tensor, bias_D: Tensor, eps: float) -> Tensor:
    """``(x - mean) / sqrt(variance + eps) * weight + bias`` along the last axis; a new tensor of x's dtype.

    All of one dtype; mean and variance are taken in float32 at least.
    """
    return functional.layer_norm(x_TD, weight_D.shape, weight_D, bias_D, eps)
