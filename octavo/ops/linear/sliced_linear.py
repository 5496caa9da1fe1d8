"""A linear map whose float32 weight is stored as slices, integers of 8 bits, which some processors multiply fastest.

Shapes: T tokens, K inputs, N outputs, P panels of 16 outputs, S steps of 64 inputs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from octavo.ops.dispatch import op
from octavo.ops.linear.linear import PLAIN, Fused, check_linear, compose

SLICES = 3
UNIT = 65536.0
"""Of the first slice in the last one's."""
LARGEST = 127.498
"""Slices of 127, 127 and almost 127: a row's largest number, which rounding cannot make too large for them."""
PIECES, PIECE_BITS = 3, 14
"""In which the reference takes a number of x: float64 sums of their products are exact up to 2 ** 16 inputs."""
TINY = 1e-30
"""Rows without a larger number count as zero."""
PANEL, STEP, QUAD = 16, 64, 4
ROWS_AT_ONCE = 64 * PANEL


@dataclass(frozen=True, eq=False)
class SlicedValues:
    """A weight [N, K] as integers of 24 bits with a scale for each output, in the order in which kernels load them.

    An entry is ``(a + b / 2 ** 8 + c / 2 ** 16) * scale`` with slices a, b and c, each from -128 to 127. Numbers of
    one output have one distance from each to the next, that of float32 at the largest of them.
    """

    slices: Tensor
    """int8 [P, S, SLICES, 16, 16, 4]: four inputs of output 0, the same of output 1 and so on, then the next four. P is
    even: the last two panels, and the last step, are filled up with zeros."""
    scales_N: Tensor
    """float32 [16 P]"""
    shape: tuple[int, int]

    @classmethod
    def pack(cls, weight_NK: Tensor) -> SlicedValues:
        """Round a dense matrix of any floating-point dtype. An output with an infinity or a NaN gets the scale NaN."""
        N, K = weight_NK.shape
        P, S = -(-N // (2 * PANEL)) * 2, -(-K // STEP)
        slices = torch.empty(P, S, SLICES, STEP // QUAD, PANEL, QUAD, dtype=torch.int8)
        scales_N = torch.empty(P * PANEL)
        for first in range(0, P * PANEL, ROWS_AT_ONCE):
            rows = slice(first, min(first + ROWS_AT_ONCE, P * PANEL))
            part_NK = weight_NK[rows].float()
            padded_NK = functional.pad(part_NK, (0, S * STEP - K, 0, rows.stop - first - len(part_NK)))
            scales_N[rows], whole_NK = _rounded(padded_NK)
            panels = slice(first // PANEL, rows.stop // PANEL)
            for i in reversed(range(SLICES)):
                by_panel = whole_NK.to(torch.int8).view(-1, PANEL, S, STEP // QUAD, QUAD)
                slices[panels, :, i] = by_panel.permute(0, 2, 3, 1, 4)
                whole_NK = (whole_NK + 128) >> 8
        return cls(slices, scales_N, (N, K))

    @property
    def format(self) -> str:
        """Name of the numbers' format."""
        return "float32"

    @property
    def num_bytes(self) -> int:
        return self.slices.nbytes + self.scales_N.nbytes

    def rows(self, ids_T: Tensor) -> Tensor:
        """Rows of the weight as float32 [T, K]."""
        return self.integer_rows(ids_T).float() * (self.scales_N[ids_T, None] / UNIT)

    def integer_rows(self, ids_T: Tensor) -> Tensor:
        """Rows of the weight without their scales, as int32 [T, K]: multiples of 1 / UNIT."""
        parts = self.slices[ids_T // PANEL, :, :, :, ids_T % PANEL].int().unbind(2)
        integers = torch.zeros_like(parts[0])
        for part in parts:
            integers = (integers << 8) + part
        return integers.flatten(1)[:, : self.shape[1]]


def _rounded(x_NK: Tensor) -> tuple[Tensor, Tensor]:
    """Scales of rows, and the rows' integers."""
    largest_N = x_NK.abs().amax(dim=1)
    factors_N = torch.where(largest_N < TINY, 0, LARGEST * UNIT / largest_N)
    is_finite_N = largest_N.isfinite()
    whole_NK = (x_NK * factors_N[:, None]).where(is_finite_N[:, None], 0).round().int()
    return torch.where(largest_N < TINY, 0, largest_N / LARGEST).where(is_finite_N, torch.nan), whole_NK


@op
def sliced_linear(x_TK: Tensor, weight: SlicedValues, fused: Fused = PLAIN) -> Tensor:
    """``ops.linear``, in the dtype of x.

    Kernels slice rows of x likewise, after the norm, and sum products of slices exactly, without the smallest, so that
    the error is that of float32 sums of numbers of like size: about 2 ** -24 of the norms of both rows. A row of the
    result is bitwise a function of that row of x alone.
    """

    check_linear("sliced_linear", x_TK, weight.shape, fused)

    def multiply(normed_TK: Tensor) -> Tensor:
        ids_N = torch.arange(weight.shape[0], device=x_TK.device)
        y_TN = _exact_product(normed_TK.double(), weight.integer_rows(ids_N).double())
        y_TN *= weight.scales_N[ids_N] / UNIT
        return (y_TN if fused.bias_N is None else y_TN + fused.bias_N).to(x_TK.dtype)

    return compose(x_TK, fused, multiply)


def _exact_product(x_TK: Tensor, integers_NK: Tensor) -> Tensor:
    """``x @ integers.T``, the same bits in any order of additions: x is multiplied in pieces of small integers."""
    largest_T1 = x_TK.abs().amax(dim=1, keepdim=True).clamp(min=TINY)
    rest_TK, y_TN = x_TK / largest_T1, x_TK.new_zeros(len(x_TK), len(integers_NK))
    for _ in range(PIECES):
        rest_TK = rest_TK * 2.0**PIECE_BITS
        piece_TK = rest_TK.round()
        y_TN = y_TN * 2.0**PIECE_BITS + piece_TK @ integers_NK.T
        rest_TK = rest_TK - piece_TK
    return y_TN * (largest_T1 / 2.0 ** (PIECES * PIECE_BITS))
