"""From the parts of a weight, as a checkpoint gives them, to what a layer computes with.

A part is a dense tensor or a ``BlockTensor``. Dense weights are applied by ``ops.linear``. Block weights are made
dense, exactly, unless ``WeightFormat.scheme`` packs them for an op that reads blocks. A scheme is one module of this
folder with a class like ``BlockScheme``; ``SCHEMES`` lists an instance of each, best first, and the first that does
not decline the device is used when the dtype is "auto".

Shapes: T tokens, K inputs, N outputs.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeGuard

import numpy as np
import torch
from torch import Tensor

from octavo import ops
from octavo.ops.linear import Activation
from octavo.quant.blocks import PackedBlockScheme
from octavo.weights.blocks import BlockTensor, dequantize

Part = Tensor | BlockTensor


class LinearWeight(Protocol):
    """The weight of a linear map, ready to be applied."""

    @property
    def num_bytes(self) -> int:
        """Memory it takes."""
        ...

    def apply(
        self,
        x_TK: Tensor,
        bias_N: Tensor | None = None,
        norm_K: Tensor | None = None,
        eps: float = 0.0,
        residual_TN: Tensor | None = None,
        activation: Activation | None = None,
    ) -> Tensor:
        """``act(rms_norm(x) @ weight.T + bias) + residual`` in the dtype of x; see ``ops.linear``."""
        ...


class BlockScheme(Protocol):
    """A way to compute with block weights as they are. Activations are float32."""

    kinds: frozenset[str]
    """Block kinds it packs; weights of other kinds are made dense."""

    def declines(self, device: str) -> str | None:
        """Why it is not worth using on this machine's device of this type; ``None`` if it is."""
        ...

    def pack(self, blocks: BlockTensor) -> LinearWeight:
        """Bring blocks of one of its kinds into the form that its op reads."""
        ...


SCHEMES: tuple[BlockScheme, ...] = (PackedBlockScheme(),)


@dataclass(frozen=True)
class WeightFormat:
    """What weights become when they are loaded. ``dtype`` is that of activations too."""

    dtype: torch.dtype
    device: torch.device
    scheme: BlockScheme | None = None
    """``None``: every weight is made dense."""

    @property
    def kv_dtype(self) -> torch.dtype:
        """The type of keys and values that suits: beside weights of 8 bits and less, 16 bits lose nothing more."""
        return self.dtype if self.scheme is None else torch.float16


@dataclass(frozen=True)
class DenseWeight:
    """A weight as a plain matrix."""

    weight_NK: Tensor

    @property
    def num_bytes(self) -> int:
        return self.weight_NK.nbytes

    def apply(
        self,
        x_TK: Tensor,
        bias_N: Tensor | None = None,
        norm_K: Tensor | None = None,
        eps: float = 0.0,
        residual_TN: Tensor | None = None,
        activation: Activation | None = None,
    ) -> Tensor:
        return ops.linear(x_TK, self.weight_NK, bias_N, norm_K, eps, residual_TN, activation)


def best_scheme(device: torch.device) -> BlockScheme | None:
    """The scheme to use on this device when nothing else is asked for."""
    return next((scheme for scheme in SCHEMES if scheme.declines(device.type) is None), None)


def to_dense(part: Part, form: WeightFormat) -> Tensor:
    """The part as a dense tensor of the format's dtype, on its device; itself where it is that already."""
    tensor = torch.from_numpy(dequantize(part)) if isinstance(part, BlockTensor) else part
    return tensor.to(device=form.device, dtype=form.dtype)


def make_weights(parts: Sequence[Part], form: WeightFormat) -> list[LinearWeight]:
    """Weights whose outputs, side by side, are those of ``parts`` in order; neighbours of one kind become one."""

    def kind(part: Part) -> str:
        return part.kind if _is_packed(part, form) else "dense"

    return [_fuse(list(group), form) for _, group in itertools.groupby(parts, kind)]


def _is_packed(part: Part, form: WeightFormat) -> TypeGuard[BlockTensor]:
    return form.scheme is not None and isinstance(part, BlockTensor) and part.kind in form.scheme.kinds


def _fuse(parts: list[Part], form: WeightFormat) -> LinearWeight:
    blocks = [part for part in parts if _is_packed(part, form)]
    if form.scheme is not None and blocks:
        num_rows = sum(part.shape[0] for part in blocks)
        data = blocks[0].data if len(blocks) == 1 else np.concatenate([part.data for part in blocks])
        return form.scheme.pack(BlockTensor(blocks[0].kind, (num_rows, blocks[0].shape[1]), data))
    if len(parts) == 1:
        return DenseWeight(to_dense(parts[0], form))
    num_rows = sum(part.shape[0] for part in parts)
    weight_NK = torch.empty(num_rows, parts[0].shape[1], dtype=form.dtype, device=form.device)
    for rows, part in zip(weight_NK.split_with_sizes([part.shape[0] for part in parts]), parts, strict=True):
        rows.copy_(to_dense(part, form))
    return DenseWeight(weight_NK)
