"""Unpacks integers of a few bits from int32 words.

Shapes: R rows.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def num_words(count: int, bits: int) -> int:
    """Words that hold ``count`` integers without gaps."""
    return -(-count * bits // 32)


def unpack_fields(words: Tensor, bits: int, count: int) -> Tensor:
    """The first ``count`` integers of ``bits`` bits, from 1 to 8, of each row of int32 words [R, any], as uint8.

    Integers follow one another from the lowest bit on without gaps, also across words.
    """
    data = words.reshape(-1).view(torch.uint8).view(len(words), -1)
    if bits == 8:
        return data[:, :count]
    if bits == 4:
        return torch.stack((data & 15, data >> 4), dim=2).flatten(1)[:, :count]
    # Eight integers take `bits` bytes. The first 16 bits from the byte in which an integer begins hold all of it.
    data = functional.pad(data, (0, -data.shape[1] % bits + bits))
    octets, mask = data.view(len(data), -1, bits).to(torch.int16), (1 << bits) - 1
    after = functional.pad(octets, (0, 1))
    fields = [
        (octets[:, :, at // 8] | (after[:, :, at // 8 + 1] << 8)) >> at % 8 & mask for at in range(0, 8 * bits, bits)
    ]
    return torch.stack(fields, dim=2).flatten(1)[:, :count].to(torch.uint8)


def signed(codes: Tensor, bits: int) -> Tensor:
    """Unsigned integers of ``bits`` bits (uint8), minus 2 ** (bits - 1), as int8."""
    return (codes ^ 128 if bits == 8 else codes - (1 << (bits - 1))).view(torch.int8)
