"""Elementwise functions that are batch-invariant: the same bits wherever a number lies in a tensor.

On CPUs torch computes most of a tensor in vectors and the rest number by number, and the two differ in the last bit for
the sigmoid, the softplus and for GELU's tanh form; for GELU itself, where the tensor is a part of another. So a row
would depend on how many rows are computed with it. For the exponential and the logarithm they do not differ.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def sigmoid(x: Tensor) -> Tensor:
    """``1 / (1 + e^-x)`` of floating-point numbers."""
    return (1 + (-x).exp()).reciprocal()


def softplus(x: Tensor) -> Tensor:
    """``ln(1 + e^x)`` of floating-point numbers, exact to a few units in the last place however small it is."""
    small = (-x.abs()).exp()
    sum_ = 1 + small
    # ln(1 + small) by what the sum lost to rounding: Goldberg, "What every computer scientist should know", theorem 4
    return x.clamp(min=0) + torch.where(sum_ == 1, small, sum_.log() * (small / (sum_ - 1)))


def gelu(x: Tensor, approximate: bool) -> Tensor:
    """``x * Phi(x)`` (Hendrycks and Gimpel, arXiv 1606.08415), or its tanh form with ``approximate``."""
    if not approximate:
        return functional.gelu(x.contiguous())
    return x * sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))  # (1 + tanh(z)) / 2 is the sigmoid of 2 z
