"""Integer weights with a scale, and possibly a zero point, for each group of inputs.

GPTQ, AWQ and the integer formats of compressed-tensors all become a ``GroupedStored``.

Shapes: K inputs, N outputs, G groups of K / G inputs.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from octavo.ops.linear.block_linear import ROWS_AT_ONCE, PackedBlocks
from octavo.ops.linear.grouped_linear import Number, PackedGroups
from octavo.ops.linear.scaled_linear import ScaledValues
from octavo.quant.stored.block_weight import BlockWeight, outlined_blocks, packs_blocks
from octavo.quant.stored.packed import GroupedWeight, pack_groups, packs_groups
from octavo.quant.stored.scaled import ScaledWeight, has_scaled_kernel
from octavo.quant.stored.stored_weight import LinearWeight, Order, StoredWeight, WeightFormat, row_slices, shard_range
from octavo.weights.gguf.block_formats import Groups

FEWEST_TOGETHER, MOST_TOGETHER = 16, 64
"""Fewest and most inputs that share a scale in a packed weight; ``ops.block_linear`` rounds as many activations
together. Longer groups are divided."""


@dataclass(frozen=True, eq=False)
class GroupedStored(StoredWeight):
    """A matrix whose entries are ``(code - zero) * scale``, computed in float32."""

    codes_NK: Tensor
    """int8, from -2 ** (bits - 1) to 2 ** (bits - 1) - 1: formats of unsigned codes are shifted by 2 ** (bits - 1)."""
    scales_NG: Tensor
    """float32; groups are runs of K / G columns. G is 1 for a scale per output."""
    zeros_NG: Tensor | None
    """int8, with the same range as the codes; ``None``: zero."""
    bits: int
    """From 2 to 8."""
    order_K: Tensor | None = None
    """int64: the input that each column multiplies; ``None``: column k multiplies input k.

    Checkpoints in activation order (GPTQ's ``desc_act``) assign inputs to groups freely. Their columns are sorted by
    group, which makes groups runs of columns.
    """
    rounds_activations: bool = False
    """Whether the matrix was made to be multiplied by integers of 8 bits."""

    @property
    def shape(self) -> tuple[int, int]:
        N, K = self.codes_NK.shape
        return N, K

    @property
    def group(self) -> int:
        """Number of columns that share a scale."""
        return self.shape[1] // self.scales_NG.shape[1]

    @property
    def layout(self) -> Hashable:
        order = None if self.order_K is None else self.order_K.numpy().tobytes()
        return "grouped", self.bits, self.group, self.zeros_NG is not None, order, self.rounds_activations

    def placed(self, device: torch.device) -> GroupedStored:
        """But for ``order_K``, by which weights are compared."""
        scales_NG, zeros_NG = (None if part is None else part.to(device) for part in self._sides)
        assert scales_NG is not None
        return replace(self, codes_NK=self.codes_NK.to(device), scales_NG=scales_NG, zeros_NG=zeros_NG)

    def rows(self, order: Order) -> GroupedStored:
        index = torch.from_numpy(order)
        zeros = None if self.zeros_NG is None else self.zeros_NG[index]
        return replace(self, codes_NK=self.codes_NK[index], scales_NG=self.scales_NG[index], zeros_NG=zeros)

    def join(self, others: Sequence[GroupedStored]) -> GroupedStored:
        parts = (self, *others)
        zeros = [part.zeros_NG for part in parts if part.zeros_NG is not None]
        return replace(
            self,
            codes_NK=torch.cat([part.codes_NK for part in parts]),
            scales_NG=torch.cat([part.scales_NG for part in parts]),
            zeros_NG=torch.cat(zeros) if zeros else None,
        )

    def shard(self, dim: int, rank: int, size: int, unit: int = 1) -> GroupedStored:
        own = shard_range(self.shape, dim, rank, size, unit=unit)
        if dim == 1:
            group = 1 if self.order_K is not None else math.gcd(self.group, own.start, own.stop)
            part = self._in_groups_of(group)._columns(own)
            # What several groups of a row are multiplied by is not rounded, nor is it in a part with one of them.
            return replace(part, rounds_activations=self.rounds_activations and self.scales_NG.shape[1] == 1)
        zeros = None if self.zeros_NG is None else self.zeros_NG[own.start : own.stop]
        codes, scales = (part[own.start : own.stop] for part in (self.codes_NK, self.scales_NG))
        return replace(self, codes_NK=codes, scales_NG=scales, zeros_NG=zeros)

    def fill(self, out_NK: Tensor) -> None:
        device = out_NK.device
        for rows in row_slices(self.shape):
            scales_RG1 = self.scales_NG[rows].to(device).unsqueeze(2)
            weight = self.codes_NK[rows].to(device).float().view(*scales_RG1.shape[:2], self.group)
            if self.zeros_NG is not None:
                weight -= self.zeros_NG[rows].to(device).unsqueeze(2)
            weight *= scales_RG1
            if self.order_K is None:
                out_NK[rows].copy_(weight.flatten(1))
            else:
                out_NK[rows].index_copy_(1, self.order_K.to(device), weight.flatten(1).to(out_NK.dtype))

    def pack(self, form: WeightFormat) -> LinearWeight | None:
        if self._is_rounding and form.kernel_device != "cpu" and has_scaled_kernel(form):
            codes_NK, scales_N1 = (part.to(form.device).contiguous() for part in (self.codes_NK, self.scales_NG))
            return ScaledWeight(ScaledValues(codes_NK, scales_N1, self.group), form.dtype)
        if packs_groups(form):
            packed = self.packed_groups(form.device)
            return None if packed is None else GroupedWeight(packed, form.dtype)
        length = math.gcd(self.group, MOST_TOGETHER)
        if not packs_blocks(form) or length < FEWEST_TOGETHER:
            return None
        kind, bits = f"int{self.bits}", 4 if self.bits <= 4 else 8
        if self.codes_NK.is_meta:
            return outlined_blocks(kind, self.shape, bits, length, 2 if self.zeros_NG is None else 8)
        order = None if self.order_K is None else self.order_K.to(torch.int32)
        return BlockWeight(PackedBlocks.of_groups(kind, self.shape, bits, self._numbers(bits, length), order))

    @property
    def _is_rounding(self) -> bool:
        """Whether kernels that round activations take it: with one scale for each output."""
        is_plain = self.zeros_NG is None and self.order_K is None
        return self.rounds_activations and is_plain and self.scales_NG.shape[1] == 1

    def packed_groups(self, device: torch.device) -> PackedGroups | None:
        """For ``ops.grouped_linear``, on this device; ``None`` if its kernels do not take such groups."""
        number: Number = "int4" if self.bits <= 4 else "int8"
        return pack_groups(number, self.codes_NK, self.scales_NG, self.group, device, self.zeros_NG, self.order_K)

    def _numbers(self, bits: int, length: int) -> Iterator[Groups]:
        """Unsigned numbers, with groups divided into groups of ``length``; zero points become minima."""
        offset, parts = 1 << (bits - 1), self.group // length
        for first in range(0, self.shape[0], ROWS_AT_ONCE):
            rows = slice(first, first + ROWS_AT_ONCE)
            numbers = (self.codes_NK[rows].to(torch.int16) + offset).to(torch.uint8).numpy()
            scales = self.scales_NG[rows].repeat_interleave(parts, dim=1)
            if self.zeros_NG is None:
                yield Groups(numbers, offset, scales.numpy(), None)
            else:
                minima = -(self.zeros_NG[rows].float() + offset).repeat_interleave(parts, dim=1) * scales
                yield Groups(numbers, 0, scales.numpy(), minima.numpy())

    def _in_groups_of(self, length: int) -> GroupedStored:
        """The same matrix in smaller groups. In groups of 1, columns are in the order of inputs."""
        if length == self.group and self.order_K is None:
            return self
        parts = [None if part is None else part.repeat_interleave(self.group // length, dim=1) for part in self._sides]
        codes_NK = self.codes_NK
        if self.order_K is not None:
            place_K = torch.argsort(self.order_K)
            codes_NK = codes_NK[:, place_K]
            parts = [None if part is None else part[:, place_K] for part in parts]
        scales, zeros = parts
        assert scales is not None
        return replace(self, codes_NK=codes_NK, scales_NG=scales, zeros_NG=zeros, order_K=None)

    def _columns(self, own: range) -> GroupedStored:
        """Whole groups of columns, of a matrix in the order of inputs."""
        first, count = own.start // self.group, len(own) // self.group
        scales, zeros = (None if part is None else part.narrow(1, first, count) for part in self._sides)
        assert scales is not None
        codes_NK = self.codes_NK.narrow(1, own.start, len(own))
        return replace(self, codes_NK=codes_NK, scales_NG=scales, zeros_NG=zeros)

    @property
    def _sides(self) -> tuple[Tensor, Tensor | None]:
        return self.scales_NG, self.zeros_NG
