"""Elementwise functions that are batch-invariant: the same bits wherever a number lies in a tensor.

On CPUs torch computes most of a tensor in vectors and the rest number by number, and the two differ in the last bit for
the sigmoid and for GELU's tanh form; for GELU itself, where the tensor is a part of another. So a row would depend on
how many rows are computed with it. For the exponential they do not differ.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional


def sigmoid(x: Tensor) -> Tensor:
    """``1 / (1 + e^-x)`` of floating-point numbers."""
    return (1 + (-x).exp()).reciprocal()


def gelu(x: Tensor, approximate: bool) -> Tensor:
    """``x * Phi(x)`` (Hendrycks and Gimpel, arXiv 1606.08415), or its tanh form with ``approximate``."""
    if not approximate:
        return functional.gelu(x.contiguous())
    return x * sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))  # (1 + tanh(z)) / 2 is the sigmoid of 2 z
