"""Block-quantised weights of GGUF files; all but MXFP4 are repacked once for ``ops.block_linear``.

Shapes: T tokens, K inputs, N outputs.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from octavo.ops.dispatch import REFERENCE
from octavo.ops.linear.block_linear import FOUR_BIT_KINDS, KINDS, PANEL, PackedBlocks, block_linear
from octavo.ops.linear.grouped_linear import Number, PackedGroups
from octavo.quant.stored.packed import GroupedWeight, pack_groups, packs_groups
from octavo.quant.stored.stored_weight import (
    LinearWeight,
    Order,
    OutlinedWeight,
    PackedWeight,
    StoredWeight,
    WeightFormat,
    shard_range,
)
from octavo.weights.gguf.block_formats import BLOCK_KINDS, BlockTensor, dequantize, split_groups

NUMBERS: dict[str, Number] = {kind: "uint4" if kind in FOUR_BIT_KINDS else "int8" for kind in KINDS}
NUMBERS |= dict.fromkeys(("Q3_K", "Q4_0", "TQ1_0", "TQ2_0"), "int4")
"""Numbers as which blocks are packed for GPUs."""


@dataclass(frozen=True, eq=False)
class BlockWeight(PackedWeight[PackedBlocks]):
    """A weight repacked into panels for ``ops.block_linear``; activations must be float32."""

    dtype: torch.dtype = torch.float32
    product = block_linear


@dataclass(frozen=True, eq=False)
class GgufStored(StoredWeight):
    """A matrix in blocks of one kind: the concatenated rows of one or more tensors."""

    parts: tuple[BlockTensor, ...]

    @property
    def shape(self) -> tuple[int, int]:
        return sum(part.shape[0] for part in self.parts), self.parts[0].shape[1]

    @property
    def layout(self) -> Hashable:
        return self._kind

    def rows(self, order: Order) -> GgufStored:
        one = self._one()
        return GgufStored((replace(one, shape=(len(order), one.shape[1]), data=one.data[order]),))

    def join(self, others: Sequence[GgufStored]) -> GgufStored:
        return GgufStored(tuple(itertools.chain(self.parts, *(other.parts for other in others))))

    @property
    def column_block(self) -> int:
        return BLOCK_KINDS[self._kind].length

    def shard(self, dim: int, rank: int, size: int, unit: int = 1) -> GgufStored:
        one, kind = self._one(), BLOCK_KINDS[self._kind]
        own = shard_range(self.shape, dim, rank, size, (1, kind.length)[dim], unit)
        if dim == 0:
            return GgufStored((replace(one, shape=(len(own), one.shape[1]), data=one.data[own.start : own.stop]),))
        start, stop = kind.row_bytes(own.start), kind.row_bytes(own.stop)
        return GgufStored((replace(one, shape=(one.shape[0], len(own)), data=one.data[:, start:stop]),))

    def fill(self, out_NK: Tensor) -> None:
        for rows, part in zip(out_NK.split_with_sizes([part.shape[0] for part in self.parts]), self.parts, strict=True):
            rows.copy_(torch.from_numpy(dequantize(part)))

    def dense(self, form: WeightFormat) -> Tensor:
        if len(self.parts) > 1:
            return super().dense(form)
        return torch.from_numpy(dequantize(self.parts[0])).to(device=form.device, dtype=form.dtype)

    def pack(self, form: WeightFormat) -> LinearWeight | None:
        if packs_groups(form):
            packed = self.packed_groups(form.device)
            return None if packed is None else GroupedWeight(packed, form.dtype)
        if not form.packs or self._kind not in KINDS or without_kernel(form.device.type) is not None:
            return None
        return BlockWeight(PackedBlocks.pack(self._one()))

    def packed_groups(self, device: torch.device) -> PackedGroups | None:
        """For ``ops.grouped_linear``, on this device; ``None`` for kinds that it does not take."""
        number = NUMBERS.get(self._kind)
        if number is None:
            return None
        groups = split_groups(self._one())
        codes_NK = torch.from_numpy((groups.numbers - np.uint8(groups.zero_point)).view(np.int8))  # modulo 256
        scales_NG, minima_NG = (
            None if part is None else torch.from_numpy(np.ascontiguousarray(part, dtype=np.float32))
            for part in (groups.scales, groups.minima)
        )
        assert scales_NG is not None
        group = self.shape[1] // scales_NG.shape[1]
        return pack_groups(number, codes_NK, scales_NG, group, device, minima_NG=minima_NG)

    @property
    def _kind(self) -> str:
        return self.parts[0].kind

    def _one(self) -> BlockTensor:
        if len(self.parts) == 1:
            return self.parts[0]
        names = " or ".join(part.name for part in self.parts)
        return BlockTensor(self._kind, self.shape, np.concatenate([part.data for part in self.parts]), names)


def packs_blocks(form: WeightFormat) -> bool:
    """Whether ``ops.block_linear`` has a kernel for this format."""
    return form.packs and form.kernel_device == "cpu" and without_kernel("cpu") is None


def outlined_blocks(kind: str, shape: tuple[int, int], bits: int, length: int, scale_bytes: int) -> OutlinedWeight:
    """A ``BlockWeight`` without content, of groups of ``length`` inputs, whose scales and minima take ``scale_bytes``
    together. That is about: scales take two bytes or four, by their values."""
    N, K = shape
    rows = -(-N // PANEL) * PANEL
    return OutlinedWeight(shape, kind, rows * (K * bits // 8 + K // length * scale_bytes))


def without_kernel(device: str) -> str | None:
    """Why blocks are dequantised on this device type; ``None`` if ``block_linear`` has a kernel for it.

    The reference implementation is not used instead: it would dequantise the complete weight at every call.
    """
    if block_linear.chosen(device, torch.float32) != REFERENCE:
        return None
    choices = block_linear.choices(device, torch.float32)
    reasons = [f"{choice.kernel}: {choice.reason}" for choice in choices if not choice.chosen]
    return "; ".join(reasons) or f"block_linear has no kernel for {device}"
