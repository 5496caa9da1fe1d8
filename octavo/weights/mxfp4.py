"""MXFP4 weights: 32 numbers of 4 bits share a power of two (OCP Microscaling Formats Specification 1.0, section 5).

A number has a sign bit, two exponent bits and one mantissa bit; the shared exponent is a byte with bias 127. All values
within the exponent range of bfloat16 are exact in it.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 32
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


def decode_mxfp4(blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Dequantise uint8 ``blocks`` [..., G, 16] with uint8 ``scales`` [..., G] to [..., 32 G].

    The low nibble of a byte precedes the high nibble.
    """
    values = torch.tensor(VALUES, dtype=torch.float32, device=blocks.device)
    numbers = values[torch.stack((blocks & 15, blocks >> 4), dim=-1).int()].flatten(-2)
    exponents = scales.to(torch.int32) - 127
    return torch.ldexp(numbers, exponents.unsqueeze(-1)).flatten(-2).to(dtype)
