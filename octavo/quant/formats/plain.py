"""Weights of checkpoints without a ``quantization_config``: one tensor per matrix, whose type determines its format.

In safetensors files the type is a floating-point dtype; in GGUF files it may be a block kind.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from octavo.errors import CheckpointError
from octavo.quant.checkpoint_tensors import Tensors
from octavo.quant.stored.block_weight import GgufStored
from octavo.quant.stored.stored_weight import DenseStored, StoredWeight
from octavo.weights.gguf.block_formats import BlockTensor


@dataclass(frozen=True)
class Plain:
    """``NAME.weight`` for a matrix, ``NAME`` for a stack of them. ``QuantMethod`` documents the methods."""

    has_fp8_cache_scales: bool = field(default=True, kw_only=True)

    def matrix(self, name: str, shape: tuple[int, int], tensors: Tensors, is_transposed: bool) -> StoredWeight:
        N, K = shape
        part = tensors.load(f"{name}.weight", (K, N) if is_transposed else shape)
        if isinstance(part, BlockTensor):
            if is_transposed:
                raise CheckpointError(f"tensor {name}.weight is {part.kind}; expected floating-point numbers")
            return GgufStored((part,))
        return DenseStored((part.t() if is_transposed else part,))

    def stack(
        self, name: str, shape: tuple[int, int, int], tensors: Tensors, is_transposed: bool
    ) -> Sequence[StoredWeight]:
        X, N, K = shape
        stack = tensors.numbers(name, (X, K, N) if is_transposed else shape)
        return [DenseStored((part.t() if is_transposed else part,)) for part in stack]


PLAIN = Plain()
