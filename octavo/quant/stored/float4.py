"""FP4 weights: numbers of 4 bits (E2M1), with a scale for each group of inputs.

MXFP4 has powers of two for groups of 32 (OCP Microscaling Formats Specification 1.0, section 5.2). NVFP4 has FP8
numbers for groups of 16, and one float32 for the tensor by which these are multiplied or divided.

Shapes: K inputs, N outputs, G groups of K / G inputs.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from octavo.ops.linear.block_linear import ROWS_AT_ONCE, PackedBlocks
from octavo.ops.linear.grouped_linear import E2M1, PackedGroups
from octavo.quant.checkpoint_tensors import Tensors
from octavo.quant.stored.block_weight import BlockWeight, outlined_blocks, packs_blocks
from octavo.quant.stored.groups import num_groups
from octavo.quant.stored.packed import GroupedWeight, pack_groups, packs_groups
from octavo.quant.stored.stored_weight import (
    LinearWeight,
    Order,
    StoredWeight,
    WeightFormat,
    chosen_rows,
    joined_rows,
    row_slices,
    shard_range,
)
from octavo.weights.gguf.block_formats import Groups

ZERO_POINT = 12
NVFP4_GROUP, MXFP4_GROUP = 16, 32


@dataclass(frozen=True, eq=False)
class Float4Stored(StoredWeight):
    """A matrix whose entries are ``E2M1[code] * scale``, computed in float32.

    A group's scale is ``group_scale * tensor_scale`` or, if ``divides``, ``group_scale / tensor_scale``, in float32.
    """

    codes: Tensor
    """uint8 [N, K / 2]: even inputs in low nibbles, odd inputs in high nibbles."""
    group_scales_NG: Tensor
    """uint8 (MXFP4): the exponent of a power of two, plus 127. float8_e4m3fn (NVFP4)."""
    tensor_scales_N: Tensor | None = None
    """float32, for each row that of its tensor; ``None``: 1."""
    divides: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.codes), self.codes.shape[1] * 2

    @property
    def group(self) -> int:
        """Number of columns that share a scale."""
        return self.shape[1] // self.group_scales_NG.shape[1]

    @property
    def layout(self) -> Hashable:
        return "float4", self.group, self.group_scales_NG.dtype, self.tensor_scales_N is not None, self.divides

    @property
    def scales_NG(self) -> Tensor:
        """The scales of groups, float32."""
        if self.group_scales_NG.dtype == torch.uint8:
            scales_NG = self.group_scales_NG.contiguous().view(torch.float8_e8m0fnu).float()
        else:
            scales_NG = self.group_scales_NG.float()
        if self.tensor_scales_N is None:
            return scales_NG
        tensor_scales_N1 = self.tensor_scales_N.unsqueeze(1)
        return scales_NG / tensor_scales_N1 if self.divides else scales_NG * tensor_scales_N1

    def placed(self, device: torch.device) -> Float4Stored:
        tensor_scales = None if self.tensor_scales_N is None else self.tensor_scales_N.to(device)
        return Float4Stored(self.codes.to(device), self.group_scales_NG.to(device), tensor_scales, self.divides)

    def rows(self, order: Order) -> Float4Stored:
        """Without a copy if they are equally far from each other."""
        steps = np.diff(order)
        step = int(steps[0]) if len(steps) else 1
        if len(order) and step > 0 and np.all(steps == step):
            first = int(order[0])
            return self._rows(slice(first, first + len(order) * step, step))
        group_scales = chosen_rows(self.group_scales_NG.view(torch.uint8), order).view(self.group_scales_NG.dtype)
        tensor_scales = None if self.tensor_scales_N is None else chosen_rows(self.tensor_scales_N, order)
        return Float4Stored(chosen_rows(self.codes, order), group_scales, tensor_scales, self.divides)

    def join(self, others: Sequence[Float4Stored]) -> Float4Stored:
        parts = (self, *others)
        group_scales = joined_rows([part.group_scales_NG.view(torch.uint8) for part in parts])
        tensor_scales = [part.tensor_scales_N for part in parts if part.tensor_scales_N is not None]
        return Float4Stored(
            joined_rows([part.codes for part in parts]),
            group_scales.view(self.group_scales_NG.dtype),
            joined_rows(tensor_scales) if tensor_scales else None,
            self.divides,
        )

    def divided(self, count: int) -> list[Float4Stored]:
        """So many equal parts of the rows."""
        step = self.shape[0] // count
        return [self._rows(slice(i * step, (i + 1) * step)) for i in range(count)]

    @property
    def column_block(self) -> int:
        return self.group

    def shard(self, dim: int, rank: int, size: int, unit: int = 1) -> Float4Stored:
        own = shard_range(self.shape, dim, rank, size, (1, self.group)[dim], unit)
        if dim == 0:
            return self._rows(slice(own.start, own.stop))
        return Float4Stored(
            self.codes[:, own.start // 2 : own.stop // 2],
            self.group_scales_NG[:, own.start // self.group : own.stop // self.group],
            self.tensor_scales_N,
            self.divides,
        )

    def fill(self, out_NK: Tensor) -> None:
        numbers = torch.tensor(E2M1, device=out_NK.device)
        for rows in row_slices(self.shape):
            part = self._rows(rows)
            codes_NK = _apart(part.codes.to(out_NK.device))
            weight = numbers[codes_NK.int()].view(len(codes_NK), -1, self.group)
            weight *= part.scales_NG.to(out_NK.device).unsqueeze(2)
            out_NK[rows].copy_(weight.flatten(1))

    def pack(self, form: WeightFormat) -> LinearWeight | None:
        """On a CPU, codes become integers of 8 bits: twice their numbers, from -12 to 12, with half the scale."""
        if packs_groups(form):
            packed = self.packed_groups(form.device)
            return None if packed is None else GroupedWeight(packed, form.dtype)
        if not packs_blocks(form):
            return None
        if self.codes.is_meta:
            scale_bytes = 2 if self.tensor_scales_N is None else 4
            return outlined_blocks("float4", self.shape, 8, self.group, scale_bytes)
        return BlockWeight(PackedBlocks.of_groups("float4", self.shape, 8, self._numbers()))

    def packed_groups(self, device: torch.device) -> PackedGroups | None:
        """For ``ops.grouped_linear``, on this device; ``None`` if its kernels do not take such groups."""
        placed = self.placed(device)  # while two codes are a byte
        return pack_groups("e2m1", _apart(placed.codes), placed.scales_NG, self.group, device)

    def _numbers(self) -> Iterator[Groups]:
        doubled = (torch.tensor(E2M1) * 2 + ZERO_POINT).to(torch.uint8)
        for first in range(0, self.shape[0], ROWS_AT_ONCE):
            part = self._rows(slice(first, first + ROWS_AT_ONCE))
            yield Groups(doubled[_apart(part.codes).int()].numpy(), ZERO_POINT, (part.scales_NG / 2).numpy(), None)

    def _rows(self, rows: slice) -> Float4Stored:
        tensor_scales = None if self.tensor_scales_N is None else self.tensor_scales_N[rows]
        return Float4Stored(self.codes[rows], self.group_scales_NG[rows], tensor_scales, self.divides)


def _apart(codes: Tensor) -> Tensor:
    """Codes of which each byte has two, one a byte: [N, K]."""
    apart = codes.new_empty(*codes.shape, 2)
    if not apart.is_meta:
        torch.bitwise_and(codes, 15, out=apart[..., 0])
        torch.bitwise_right_shift(codes, 4, out=apart[..., 1])
    return apart.flatten(1)


def read_nvfp4(
    name: str, shape: tuple[int, int], tensors: Tensors, weight: str, tensor_scale: str, divides: bool
) -> Float4Stored:
    """Module ``name``, whose tensors are ``weight``, ``weight_scale`` and ``tensor_scale``."""
    N, K = shape
    G = num_groups(name, K, NVFP4_GROUP)
    codes = tensors.typed(f"{name}.{weight}", (N, K // 2), torch.uint8)
    group_scales = tensors.typed(f"{name}.weight_scale", (N, G), torch.float8_e4m3fn)
    tensors.check(torch.isfinite(group_scales.float()), f"tensor {name}.weight_scale has scales that are not numbers")
    scale = tensors.scales(f"{name}.{tensor_scale}", (1,), (), (1, 1)).reshape(1)
    tensors.check(scale > 0, f"tensor {name}.{tensor_scale} is not positive")
    tensors.leave_out_activation_scales(name)
    return Float4Stored(codes, group_scales, scale.expand(N), divides)


def read_mxfp4(
    name: str, shape: tuple[int, int], tensors: Tensors, weight: str, scale: str = "weight_scale"
) -> Float4Stored:
    """Module ``name``, whose tensors are ``weight`` and ``scale``."""
    N, K = shape
    G = num_groups(name, K, MXFP4_GROUP)
    codes = tensors.typed(f"{name}.{weight}", (N, K // 2), torch.uint8, torch.int8).view(torch.uint8)
    exponents = tensors.typed(f"{name}.{scale}", (N, G), torch.uint8, torch.float8_e8m0fnu)
    tensors.leave_out_activation_scales(name)
    return Float4Stored(codes, checked_exponents(f"{name}.{scale}", exponents, tensors))


def checked_exponents(name: str, exponents: Tensor, tensors: Tensors) -> Tensor:
    """Exponents of powers of two, as uint8; 255 is not a number. Raises ``CheckpointError`` naming the tensor."""
    exponents = exponents.view(torch.uint8)
    tensors.check(exponents != 255, f"tensor {name} has scales that are not numbers")
    return exponents
