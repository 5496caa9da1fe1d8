"""Keys and values of 8 or 4 bits: what a cache holds of one head at one position, with scales of its own.

A row's numbers are filled up with zeros to a multiple of 16, W. The rows of a cache are of ``torch.int8`` or, for 4
bits, of ``torch.uint8``::

    int8    a scale, float32                                        W codes, the nearest numbers to x / scale
    int4    for each 32 numbers a least one and a scale, bfloat16    W / 2 bytes of two codes, the first in the low bits

A code of 8 bits times the scale is the number, and one of 4 bits times the scale plus the least number. Rows of 4 bits
hold ``rotated`` numbers, among which a few large ones are spread over all (QuaRot, arXiv 2404.00456). So a row is
written without any other: scales of a channel over many positions, which keys are best quantised with (KIVI,
arXiv 2402.02750), would change with each position. Where a number is not finite, so are all that share its scale, or
were rotated with it.

Shapes: H head dim, R bytes of a row.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

INT4: torch.dtype = torch.int4  # type: ignore[attr-defined]  # torch's annotations lack it
VECTOR = 16
GROUP = 32
"""Numbers of a row of 4 bits that share a scale."""
STORED = {torch.int8: torch.int8, INT4: torch.uint8}
"""Type of the tensors that hold rows, by the type of the KV cache."""


def row_bytes(dtype: torch.dtype, head_dim: int) -> int:
    """Bytes of one head at one position in a cache of a type, or in tensors of it."""
    width = -(-head_dim // VECTOR) * VECTOR
    if dtype == torch.int8:
        return 4 + width
    if dtype in (INT4, torch.uint8):
        return 4 * -(-width // GROUP) + width // 2
    return head_dim * dtype.itemsize


def row_length(dtype: torch.dtype, head_dim: int) -> int:
    """Items of one head at one position, in tensors of a cache."""
    return row_bytes(dtype, head_dim) // dtype.itemsize


def pack_rows(x: Tensor, stored: torch.dtype) -> Tensor:
    """Rows [..., R] of numbers [..., H]."""
    if not x.numel():
        return x.new_empty(*x.shape[:-1], row_length(stored, x.shape[-1]), dtype=stored)
    x = functional.pad(x.float(), (0, -x.shape[-1] % VECTOR))
    if stored == torch.int8:
        scale = x.abs().amax(-1, keepdim=True) / 127
        codes = _codes(x, scale).clamp(-127, 127).to(torch.int8)
        return torch.cat((scale.view(torch.int8), codes), dim=-1)
    width = x.shape[-1]
    groups = _groups(rotated(x))
    least, most = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    least = _cut(least, least < 0)
    span = (most - least) / 15
    scale = _cut(span, span > 0)
    codes = _codes(groups - least, scale).clamp(0, 15).flatten(-2)[..., :width].to(torch.uint8)
    halves = torch.cat((least, scale), dim=-1).bfloat16().flatten(-2)
    return torch.cat((halves.view(torch.uint8), codes[..., ::2] | codes[..., 1::2] << 4), dim=-1)


def unpack_rows(rows: Tensor, head_dim: int) -> Tensor:
    """The numbers [..., H], float32, of rows [..., R]; rows of floating-point numbers are returned as they are."""
    if rows.dtype == torch.int8:
        scale, codes = rows[..., :4].contiguous().view(torch.float32), rows[..., 4:]
        return (codes * scale)[..., :head_dim]
    if rows.dtype != torch.uint8:
        return rows
    num_groups = -(-head_dim // GROUP)
    halves, pairs = rows[..., : 4 * num_groups], rows[..., 4 * num_groups :]
    halves = halves.contiguous().view(torch.bfloat16).view(*rows.shape[:-1], num_groups, 2)
    least, scale = halves.float().unbind(-1)
    codes = _groups(torch.stack((pairs & 15, pairs >> 4), dim=-1).flatten(-2).float())
    numbers = (codes.double() * scale[..., None] + least[..., None]).flatten(-2)[..., : 2 * pairs.shape[-1]]
    return (rotated(numbers) / rotated_together(head_dim)).float()[..., :head_dim]


def rotated_together(head_dim: int) -> int:
    """How many neighbouring numbers of a row of 4 bits are rotated with each other: a power of two."""
    width = -(-head_dim // VECTOR) * VECTOR
    return width & -width


def rotated(x: Tensor) -> Tensor:
    """The Walsh-Hadamard transform of runs of numbers [..., W]: a sum of all, with signs of its own, in place of each.

    Twice, it is the numbers times the length of a run; and so are products of two rows with each other, once.
    """
    shape, half = x.shape, 1
    while half < rotated_together(shape[-1]):
        first, second = x.reshape(*shape[:-1], -1, 2, half).unbind(-2)
        x = torch.stack((first + second, first - second), dim=-2)
        half *= 2
    return x.view(shape)


def _groups(x: Tensor) -> Tensor:
    """Numbers [..., W] as [..., groups, 32]; what is missing of the last group are copies of its last number."""
    missing = -x.shape[-1] % GROUP
    if missing:
        x = torch.cat((x, x[..., -1:].expand(*x.shape[:-1], missing)), dim=-1)
    return x.view(*x.shape[:-1], -(-x.shape[-1] // GROUP), GROUP)


def _codes(x: Tensor, scale: Tensor) -> Tensor:
    return torch.where((scale > 0) & scale.isfinite(), x / scale, 0.0).round()


def _cut(x: Tensor, grows: Tensor) -> Tensor:
    """Numbers of float32 that bfloat16 has: the next larger in size where it ``grows``, else the next smaller."""
    bits = (x.contiguous() + 0.0).view(torch.int32)  # no negative zeros
    return torch.where(x.isfinite(), ((bits + grows.int() * 0xFFFF) & -0x10000).view(torch.float32), torch.nan)
