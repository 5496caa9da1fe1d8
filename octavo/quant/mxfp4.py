"""MXFP4 in the layout of gpt-oss: ``NAME_blocks`` and ``NAME_scales`` hold the matrices of all experts of a layer.

Shapes: X experts, K inputs, N outputs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from octavo.quant.float4 import Float4Stored
from octavo.quant.plain import PLAIN
from octavo.quant.stored import StoredWeight
from octavo.quant.targets import module_names, names_module
from octavo.quant.tensors import Tensors

BLOCK = 32


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
        return [Float4Stored(codes.flatten(1), own) for codes, own in zip(blocks, scales, strict=True)]
