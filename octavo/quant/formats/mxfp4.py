"""MXFP4 in the layout of gpt-oss: ``NAME_blocks`` and ``NAME_scales`` hold the matrices of all experts of a layer.

Shapes: X experts, K inputs, N outputs, G groups of 32 inputs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from octavo.quant.checkpoint_tensors import Tensors
from octavo.quant.config_reader import QuantKeys
from octavo.quant.formats.plain import Plain
from octavo.quant.module_matching import names_module
from octavo.quant.stored.dummy_weights import dummy_float4, is_quantised_dummy
from octavo.quant.stored.float4 import MXFP4_GROUP, Float4Stored, checked_exponents
from octavo.quant.stored.groups import num_groups
from octavo.quant.stored.stored_weight import StoredWeight


@dataclass(frozen=True)
class MXFP4(Plain):
    """Modules without packed tensors, and those listed in ``kept``, are unquantised."""

    kept: tuple[str, ...] = ()
    """``modules_to_not_convert``."""

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> MXFP4:
        """Read a ``quantization_config``. Raises ``CheckpointError``."""
        return cls(QuantKeys(values).names("modules_to_not_convert"))

    def stack(
        self, name: str, shape: tuple[int, int, int], tensors: Tensors, is_transposed: bool
    ) -> Sequence[StoredWeight]:
        X, N, K = shape
        if is_quantised_dummy(name, self.kept, tensors):
            return dummy_float4(name, (X * N, K), MXFP4_GROUP, False, tensors).divided(X)
        if names_module(self.kept, name) or not tensors.has(f"{name}_blocks"):
            return super().stack(name, shape, tensors, is_transposed)
        G = num_groups(name, K, MXFP4_GROUP)
        blocks = tensors.typed(f"{name}_blocks", (X, N, G, MXFP4_GROUP // 2), torch.uint8)
        scales = tensors.typed(f"{name}_scales", (X, N, G), torch.uint8)
        checked_exponents(f"{name}_scales", scales, tensors)
        return [Float4Stored(codes.flatten(1), own) for codes, own in zip(blocks, scales, strict=True)]
