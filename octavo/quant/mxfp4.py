"""MXFP4 in the layout of gpt-oss: ``NAME_blocks`` and ``NAME_scales`` hold the matrices of all experts of a layer.

There is no kernel for MXFP4 yet: these matrices are dequantised on loading.

Shapes: X experts, K inputs, N outputs.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from octavo.quant.plain import PLAIN
from octavo.quant.stored import LinearWeight, Order, StoredWeight, WeightFormat, filled, shard_range
from octavo.quant.targets import module_names, names_module
from octavo.quant.tensors import Tensors
from octavo.weights.mxfp4 import BLOCK, decode_mxfp4


@dataclass(frozen=True, eq=False)
class MXFP4Stored:
    """A matrix as uint8 blocks [N, K / 32, 16] with uint8 scales [N, K / 32]."""

    blocks: Tensor
    scales: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.blocks), self.blocks.shape[1] * BLOCK

    @property
    def layout(self) -> Hashable:
        return "mxfp4"

    def rows(self, order: Order) -> MXFP4Stored:
        index = torch.from_numpy(order)
        return MXFP4Stored(self.blocks[index], self.scales[index])

    def join(self, others: Sequence[MXFP4Stored]) -> MXFP4Stored:
        blocks, scales = zip(*((part.blocks, part.scales) for part in (self, *others)), strict=True)
        return MXFP4Stored(torch.cat(blocks), torch.cat(scales))

    def shard(self, dim: int, rank: int, size: int) -> MXFP4Stored:
        unit = (1, BLOCK)[dim]
        own = shard_range(self.shape, dim, rank, size, unit)
        start, count = own.start // unit, len(own) // unit
        return MXFP4Stored(self.blocks.narrow(dim, start, count), self.scales.narrow(dim, start, count))

    def fill(self, out_NK: Tensor) -> None:
        out_NK.copy_(decode_mxfp4(self.blocks, self.scales, out_NK.dtype))

    def dense(self, form: WeightFormat) -> Tensor:
        return filled([self], form)

    def pack(self, form: WeightFormat) -> LinearWeight | None:
        return None


@dataclass(frozen=True)
class MXFP4:
    """Modules without packed tensors, and those listed in ``kept``, are unquantised."""

    kept: tuple[str, ...] = ()
    """``modules_to_not_convert``."""

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> MXFP4:
        """Read a ``quantization_config``. Raises ``CheckpointError``."""
        return cls(module_names(values, "modules_to_not_convert"))

    def matrix(self, name: str, shape: tuple[int, int], tensors: Tensors, is_transposed: bool) -> StoredWeight:
        return PLAIN.matrix(name, shape, tensors, is_transposed)

    def stack(
        self, name: str, shape: tuple[int, int, int], tensors: Tensors, is_transposed: bool
    ) -> Sequence[StoredWeight]:
        if names_module(self.kept, name) or not tensors.has(f"{name}_blocks"):
            return PLAIN.stack(name, shape, tensors, is_transposed)
        X, N, K = shape
        blocks = tensors.typed(f"{name}_blocks", (X, N, K // BLOCK, BLOCK // 2), torch.uint8)
        scales = tensors.typed(f"{name}_scales", (X, N, K // BLOCK), torch.uint8)
        return [MXFP4Stored(*parts) for parts in zip(blocks, scales, strict=True)]
