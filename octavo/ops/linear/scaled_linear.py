"""A linear map whose weight is stored as numbers of 8 bits, FP8 or integers, with scales.

Shapes: T tokens, K inputs, N outputs, G groups of neighbouring inputs; the last may be shorter than the others.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from octavo.ops.dispatch import op
from octavo.ops.linear.linear import PLAIN, Fused, compose

LANES = 16
"""A group's number of inputs is a multiple of this, unless the group is a whole row."""


@dataclass(frozen=True, eq=False)
class ScaledValues:
    """A weight [N, K] whose entries are ``value * scale``."""

    values_NK: Tensor
    """float8_e4m3fn, without NaN, or int8; int8 has one group."""
    scales_NG: Tensor
    """float32"""
    group: int
    """Number of inputs that share a scale: a multiple of LANES, or K."""

    @property
    def format(self) -> str:
        """Name of the numbers' format."""
        return "int8" if self.values_NK.dtype == torch.int8 else "fp8"

    @property
    def num_bytes(self) -> int:
        return self.values_NK.nbytes + self.scales_NG.nbytes

    def rows(self, ids_T: Tensor) -> Tensor:
        """Rows of the weight as float32 [T, K]."""
        K = self.values_NK.shape[1]
        values_TK = self.values_NK.view(torch.uint8)[ids_T].view(self.values_NK.dtype).float()
        return values_TK * self.scales_NG[ids_T].repeat_interleave(self.group, dim=1)[:, :K]


@op
def scaled_linear(x_TK: Tensor, weight: ScaledValues, fused: Fused = PLAIN) -> Tensor:
    """``ops.linear``, in the dtype of x.

    Kernels may round each row of x, after the norm, to numbers of the weight's type and a scale; those for CPUs, which
    take no int8, do not. There, a row of the result is bitwise a function of that row of ``x`` alone.
    """

    def multiply(normed_TK: Tensor) -> Tensor:
        ids_N = torch.arange(len(weight.values_NK), device=x_TK.device)
        bias = None if fused.bias_N is None else fused.bias_N.float()
        return functional.linear(normed_TK.float(), weight.rows(ids_N), bias).to(x_TK.dtype)

    return compose(x_TK, fused, multiply)
