"""MXFP4 weights: 32 numbers of 4 bits share a power of two (OCP Microscaling Formats Specification 1.0, section 5).

A number is sign, two exponent bits and one mantissa bit; the shared exponent is a byte, less 127. All of them are
exact in bfloat16 as long as its exponents reach.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 32
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


def decode_mxfp4(blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """The numbers of uint8 ``blocks`` [..., G, 16] with uint8 ``scales`` [..., G], as [..., 32 G].

    The low half of a byte is the number before that of its high half.
    """
    values = torch.tensor(VALUES, dtype=torch.float32, device=blocks.device)
    numbers = values[torch.stack((blocks & 15, blocks >> 4), dim=-1).int()].flatten(-2)
    exponents = scales.to(torch.int32) - 127
    return torch.ldexp(numbers, exponents.unsqueeze(-1)).flatten(-2).to(dtype)
