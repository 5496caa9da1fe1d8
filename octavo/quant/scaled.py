"""FP8 weights: numbers of 8 bits (e4m3), with a scale for each tensor, each output or each block.

Shapes: K inputs, N outputs.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from octavo.ops.grouped_linear import PackedGroups
from octavo.quant.packed import GroupedWeight, pack_groups, packs_groups
from octavo.quant.stored import LinearWeight, Order, WeightFormat, filled, row_slices, shard_range


@dataclass(frozen=True, eq=False)
class ScaledStored:
    """A matrix whose entries are ``value * scale``, computed in float32."""

    values_NK: Tensor
    """float8_e4m3fn"""
    scales: Tensor
    """float32 [ceil(N / block rows), ceil(K / block columns)]"""
    block: tuple[int, int]
    """Rows and columns that share a scale: (N, K) for one scale, (1, K) for a scale per output."""

    @property
    def shape(self) -> tuple[int, int]:
        N, K = self.values_NK.shape
        return N, K

    @property
    def layout(self) -> Hashable:
        return "scaled", self.block[1]

    def rows(self, order: Order) -> ScaledStored:
        N, (height, width) = self.shape[0], self.block
        values_NK = self.values_NK.view(torch.uint8)[torch.from_numpy(order)].view(torch.float8_e4m3fn)
        if height >= N:
            return ScaledStored(values_NK, self.scales, (len(order), width))
        firsts = order[::height]
        if np.all(firsts % height == 0) and np.array_equal(order, _rows_of_blocks(firsts, height, len(order))):
            return ScaledStored(values_NK, self.scales[torch.from_numpy(firsts // height)], self.block)
        return ScaledStored(values_NK, self.scales[torch.from_numpy(order // height)], (1, width))

    def join(self, others: Sequence[ScaledStored]) -> ScaledStored:
        parts, (height, width) = (self, *others), self.block
        values_NK = torch.cat([part.values_NK.view(torch.uint8) for part in parts]).view(torch.float8_e4m3fn)
        if any(part.block[0] != height for part in parts) or any(part.shape[0] % height for part in parts[:-1]):
            parts, height = tuple(part._by_row() for part in parts), 1
        return ScaledStored(values_NK, torch.cat([part.scales for part in parts]), (height, width))

    def shard(self, dim: int, rank: int, size: int) -> ScaledStored:
        own = shard_range(self.shape, dim, rank, size)
        if dim == 0:
            return self.rows(np.arange(own.start, own.stop))
        height, width = self.block
        unit = math.gcd(width, len(own))
        scales = self.scales.repeat_interleave(width // unit, dim=1)
        scales = scales[:, own.start // unit : own.stop // unit].contiguous()
        return ScaledStored(self.values_NK[:, own.start : own.stop], scales, (height, unit))

    def fill(self, out_NK: Tensor) -> None:
        K, device, (height, width) = self.shape[1], out_NK.device, self.block
        for rows in row_slices(self.shape):
            weight = self.values_NK[rows].to(device).float()
            blocks = torch.arange(rows.start, rows.stop, device=device) // height
            weight *= self.scales.to(device)[blocks].repeat_interleave(width, dim=1)[:, :K]
            out_NK[rows].copy_(weight)

    def dense(self, form: WeightFormat) -> Tensor:
        return filled([self], form)

    def pack(self, form: WeightFormat) -> LinearWeight | None:
        packed = self.packed_groups(form.device) if packs_groups(form) else None
        return None if packed is None else GroupedWeight(packed, form.dtype)

    def packed_groups(self, device: torch.device) -> PackedGroups | None:
        """For ``ops.grouped_linear``, on this device; ``None`` if its kernels do not take such blocks or numbers."""
        codes_NK, (height, width) = self.values_NK.view(torch.uint8), self.block
        if any(bool(((codes_NK[rows] & 0x7F) == 0x7F).any()) for rows in row_slices(self.shape)):  # not a number
            return None
        scales = self.scales[torch.arange(self.shape[0]) // height]
        return pack_groups("e4m3", codes_NK, scales, width, device)

    def _by_row(self) -> ScaledStored:
        """The same matrix with separate scales for each row."""
        rows_N = torch.arange(self.shape[0]) // self.block[0]
        return ScaledStored(self.values_NK, self.scales[rows_N], (1, self.block[1]))


def _rows_of_blocks(firsts: Order, height: int, count: int) -> Order:
    """The ``count`` first rows of blocks that start at rows ``firsts``."""
    rows: Order = (firsts[:, None] + np.arange(height)).ravel()[:count]
    return rows
