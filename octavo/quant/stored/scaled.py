"""FP8 weights: numbers of 8 bits (e4m3), with a scale for each tensor, each output or each block.

Shapes: K inputs, N outputs.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from octavo.ops.dispatch import REFERENCE
from octavo.ops.linear.grouped_linear import PackedGroups
from octavo.ops.linear.scaled_linear import LANES, ScaledValues, scaled_linear
from octavo.quant.stored.packed import GroupedWeight, pack_groups, packs_groups
from octavo.quant.stored.stored_weight import (
    LinearWeight,
    Order,
    PackedWeight,
    StoredWeight,
    WeightFormat,
    row_slices,
    shard_range,
)


@dataclass(frozen=True, eq=False)
class ScaledStored(StoredWeight):
    """A matrix whose entries are ``value * scale``, computed in float32."""

    values_NK: Tensor
    """float8_e4m3fn"""
    scales: Tensor
    """float32 [ceil(N / block rows), ceil(K / block columns)]"""
    block: tuple[int, int]
    """Rows and columns that share a scale: (N, K) for one scale, (1, K) for a scale per output."""
    rounds_activations: bool = False
    """Whether the matrix was made to be multiplied by activations of 8 bits."""

    @property
    def shape(self) -> tuple[int, int]:
        N, K = self.values_NK.shape
        return N, K

    @property
    def layout(self) -> Hashable:
        return "scaled", self.block[1], self.rounds_activations

    def placed(self, device: torch.device) -> ScaledStored:
        return replace(self, values_NK=self.values_NK.to(device), scales=self.scales.to(device))

    def rows(self, order: Order) -> ScaledStored:
        N, (height, width) = self.shape[0], self.block
        values_NK = self.values_NK.view(torch.uint8)[torch.from_numpy(order)].view(torch.float8_e4m3fn)
        if height >= N:
            return replace(self, values_NK=values_NK, block=(len(order), width))
        firsts = order[::height]
        if np.all(firsts % height == 0) and np.array_equal(order, _rows_of_blocks(firsts, height, len(order))):
            return replace(self, values_NK=values_NK, scales=self.scales[torch.from_numpy(firsts // height)])
        scales = self.scales[torch.from_numpy(order // height)]
        return replace(self, values_NK=values_NK, scales=scales, block=(1, width))

    def join(self, others: Sequence[ScaledStored]) -> ScaledStored:
        parts, (height, width) = (self, *others), self.block
        values_NK = torch.cat([part.values_NK.view(torch.uint8) for part in parts]).view(torch.float8_e4m3fn)
        if any(part.block[0] != height for part in parts) or any(part.shape[0] % height for part in parts[:-1]):
            parts, height = tuple(part._by_row() for part in parts), 1
        scales = torch.cat([part.scales for part in parts])
        return replace(self, values_NK=values_NK, scales=scales, block=(height, width))

    def shard(self, dim: int, rank: int, size: int, unit: int = 1) -> ScaledStored:
        own = shard_range(self.shape, dim, rank, size, unit=unit)
        if dim == 0:
            return self.rows(np.arange(own.start, own.stop))
        height, width = self.block
        narrow = math.gcd(width, own.start, own.stop)
        scales = self.scales.repeat_interleave(width // narrow, dim=1)
        scales = scales[:, own.start // narrow : own.stop // narrow].contiguous()
        part = replace(self, values_NK=self.values_NK[:, own.start : own.stop], scales=scales, block=(height, narrow))
        # What several blocks of a row are multiplied by is not rounded, nor is it in a part with one of them.
        return replace(part, rounds_activations=self.rounds_activations and width >= self.shape[1])

    def fill(self, out_NK: Tensor) -> None:
        K, device, (height, width) = self.shape[1], out_NK.device, self.block
        for rows in row_slices(self.shape):
            weight = self.values_NK[rows].to(device).float()
            blocks = torch.arange(rows.start, rows.stop, device=device) // height
            weight *= self.scales.to(device)[blocks].repeat_interleave(width, dim=1)[:, :K]
            out_NK[rows].copy_(weight)

    def pack(self, form: WeightFormat) -> LinearWeight | None:
        K, width, has_kernel = self.shape[1], self.block[1], has_scaled_kernel(form)
        is_rounding = has_kernel and form.kernel_device != "cpu" and self.rounds_activations and width >= K
        if packs_groups(form) and not is_rounding:
            packed = self.packed_groups(form.device)
            return None if packed is None else GroupedWeight(packed, form.dtype)
        if not has_kernel or (form.kernel_device != "cpu" and not is_rounding):
            return None
        if (width < K and width % LANES) or _has_nan(self.values_NK.view(torch.uint8)):
            return None
        values_NK = self.values_NK.view(torch.uint8).to(form.device).contiguous().view(torch.float8_e4m3fn)
        return ScaledWeight(ScaledValues(values_NK, self._by_row().scales.to(form.device), min(width, K)), form.dtype)

    def packed_groups(self, device: torch.device) -> PackedGroups | None:
        """For ``ops.grouped_linear``, on this device; ``None`` if its kernels do not take such blocks or numbers."""
        codes_NK = self.values_NK.view(torch.uint8).to(device)  # a GPU looks through them in no time
        if _has_nan(codes_NK):
            return None
        return pack_groups("e4m3", codes_NK, self._by_row().scales, self.block[1], device)

    def _by_row(self) -> ScaledStored:
        """The same matrix with separate scales for each row."""
        rows_N = torch.arange(self.shape[0], device=self.scales.device) // self.block[0]
        return replace(self, scales=self.scales[rows_N], block=(1, self.block[1]))


def _has_nan(codes_NK: Tensor) -> bool:
    """Whether one of the bits of e4m3 numbers is no number; not on the "meta" device."""
    parts = () if codes_NK.is_meta else row_slices((codes_NK.shape[0], codes_NK.shape[1]))
    return any(bool(((codes_NK[rows] & 0x7F) == 0x7F).any()) for rows in parts)


def has_scaled_kernel(form: WeightFormat) -> bool:
    """Whether ``ops.scaled_linear`` has a kernel for this format."""
    return form.packs and scaled_linear.chosen(form.kernel_device, form.dtype) != REFERENCE


class ScaledWeight(PackedWeight[ScaledValues]):
    """A weight for ``ops.scaled_linear``."""

    product = scaled_linear


def _rows_of_blocks(firsts: Order, height: int, count: int) -> Order:
    """The ``count`` first rows of blocks that start at rows ``firsts``."""
    rows: Order = (firsts[:, None] + np.arange(height)).ravel()[:count]
    return rows
