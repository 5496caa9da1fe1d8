"""Checkpoints of NVIDIA's ModelOpt: FP8 and NVFP4, told apart by the type of a module's weight.

The settings are in ``hf_quant_config.json``, or the same in ``config.json``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch

from octavo.quant.cache_scales import CACHE_KEYS, has_fp8_scales
from octavo.quant.checkpoint_tensors import Tensors
from octavo.quant.config_reader import QuantKeys
from octavo.quant.formats.fp8 import read_fp8
from octavo.quant.formats.plain import Plain
from octavo.quant.stored.dummy_weights import dummy_float4, dummy_scaled, is_quantised_dummy
from octavo.quant.stored.float4 import NVFP4_GROUP, read_nvfp4
from octavo.quant.stored.stored_weight import StoredWeight

ALGORITHMS = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "NVFP4", "NVFP4_AWQ", "W4A16_NVFP4", "MIXED_PRECISION")
BLOCK = (128, 128)
"""Rows and columns of a block of FP8_PB_WO."""


@dataclass(frozen=True)
class ModelOpt(Plain):
    """Modules whose weight is floating-point numbers without a scale are unquantised."""

    algorithm: str
    kept: tuple[str, ...] = ()
    """``exclude_modules`` or ``ignore``, with wildcards; used for random weights alone."""

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> Plain:
        """Read a ``quantization_config``; weights are unquantised if it is about cached keys and values alone.

        Raises ``CheckpointError``.
        """
        keys = QuantKeys(values)
        inner = keys.child("quantization") or keys
        is_fp8 = has_fp8_scales(inner)
        if inner.get("quant_algo") is None and any(inner.get(key) is not None for key in CACHE_KEYS):
            return Plain(has_fp8_cache_scales=is_fp8)
        kept = inner.names("exclude_modules") + inner.names("ignore")
        return cls(inner.word("quant_algo", ALGORITHMS), kept, has_fp8_cache_scales=is_fp8)

    def matrix(self, name: str, shape: tuple[int, int], tensors: Tensors, is_transposed: bool) -> StoredWeight:
        block = BLOCK if self.algorithm == "FP8_PB_WO" else None
        if is_quantised_dummy(name, (), tensors) and not any(fnmatchcase(name, kept) for kept in self.kept):
            if "NVFP4" in self.algorithm:
                return dummy_float4(name, shape, NVFP4_GROUP, False, tensors)
            one = (1, shape[1]) if "CHANNEL" in self.algorithm else shape
            return dummy_scaled(name, shape, block or one, block is None, tensors)
        if not tensors.has(f"{name}.weight_scale") and not tensors.needs_scales(f"{name}.weight"):
            return super().matrix(name, shape, tensors, is_transposed)
        if tensors.dtype(f"{name}.weight") == torch.uint8:
            return read_nvfp4(name, shape, tensors, "weight", "weight_scale_2", divides=False)
        return read_fp8(name, shape, tensors, "weight_scale", block, rounds_activations=block is None)
