"""Hands a model its weights by name, and makes sure that the checkpoint has those and no others.

Shapes: K inputs, N outputs, D model, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from octavo.errors import CheckpointError
from octavo.layers.embedding import Embedding
from octavo.layers.linear import Linear
from octavo.layers.norm import LayerNorm, RMSNorm
from octavo.ops.block_linear import PackedBlocks
from octavo.quant.blocks import BlockWeight
from octavo.quant.scheme import DenseWeight, LinearWeight, Part, WeightFormat, make_weights, to_dense
from octavo.weights.blocks import BlockTensor

HARMLESS = re.compile(r"(^|\.)(rotary_emb\.inv_freq|h\.\d+\.attn\.(masked_)?bias)$")
"""Buffers that some exporters write: rotary angles, which follow from the configuration, and GPT-2's causal masks."""


class Source(Protocol):
    """What is needed of a checkpoint."""

    @property
    def is_dummy(self) -> bool: ...

    def names(self) -> set[str]: ...

    def describe(self, name: str) -> tuple[str, tuple[int, ...]]: ...

    def load(self, name: str, shape: tuple[int, ...]) -> Part: ...


class ExpertShape(NamedTuple):
    """The sizes of an expert, and what a checkpoint calls its parts."""

    hidden_size: int
    ffn_size: int
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"


class MapPart(NamedTuple):
    """Where the outputs of a map of the checkpoint are among those of a model's map."""

    linear: Linear
    start: int
    size: int
    num_inputs: int
    order: npt.NDArray[np.int64] | None
    """Which stored output became each output, if they were put in another order."""


class WeightLoader:
    """Loads weights by their Hugging Face names in the wanted format; every method raises ``CheckpointError``."""

    def __init__(
        self,
        source: Source,
        form: WeightFormat,
        make_linear: Callable[[Sequence[LinearWeight], Tensor | None], Linear] = Linear,
    ) -> None:
        self.form = form
        self.maps: dict[str, MapPart] = {}
        """Every linear map so far, by its name in the checkpoint."""
        self._make_linear = make_linear
        self.num_parameters = 0
        self.num_bytes = 0
        self._source = source
        self._names = source.names()
        self._used: set[str] = set()

    def has(self, name: str) -> bool:
        """Whether the checkpoint has this tensor."""
        return name in self._names

    def exact(self, name: str, *shape: int) -> Tensor:
        """One tensor in float32, for arithmetic that is done in float32 whatever the format is."""
        tensor = to_dense(self._load(name, shape), dataclasses.replace(self.form, dtype=torch.float32))
        self.num_bytes += tensor.nbytes
        return tensor

    def raw(self, name: str, *shape: int) -> Tensor:
        """One tensor of uint8, as stored. What it is made into is to be counted."""
        part = self._take(name, shape)
        if not isinstance(part, Tensor) or part.dtype != torch.uint8:
            raise CheckpointError(f"tensor {name} is {_type_name(part)}; expected uint8")
        return part

    def count(self, num_parameters: int, num_bytes: int) -> None:
        """Count weights that were made of raw tensors."""
        self.num_parameters += num_parameters
        self.num_bytes += num_bytes

    def experts(self, prefix: str, count: int, shape: ExpertShape) -> tuple[Tensor, Tensor]:
        """The dense weights of experts ``prefix.0`` and so on: [X, 2 F, D] of gates and ups, and [X, D, F]."""
        D, F = shape.hidden_size, shape.ffn_size
        gate_up, down = (
            torch.empty(size, dtype=self.form.dtype, device=self.form.device)
            for size in ((count, 2 * F, D), (count, D, F))
        )
        for i in range(count):
            gate_up[i, :F].copy_(to_dense(self._load(f"{prefix}.{i}.{shape.gate}.weight", (F, D)), self.form))
            gate_up[i, F:].copy_(to_dense(self._load(f"{prefix}.{i}.{shape.up}.weight", (F, D)), self.form))
            down[i].copy_(to_dense(self._load(f"{prefix}.{i}.{shape.down}.weight", (D, F)), self.form))
        self.num_bytes += gate_up.nbytes + down.nbytes
        return gate_up, down

    def rounded(self, number: float) -> float:
        """A number as the format holds it."""
        return torch.tensor(number, dtype=self.form.dtype).item()

    def dense(self, name: str, *shape: int) -> Tensor:
        """One tensor, dense."""
        tensor = to_dense(self._load(name, shape), self.form)
        self.num_bytes += tensor.nbytes
        return tensor

    def norm(self, name: str, size: int, eps: float, offset: float = 0.0) -> RMSNorm:
        """The normalisation ``name.weight``, which is stored less ``offset``."""
        return RMSNorm(self.norm_weight(f"{name}.weight", size, offset), eps)

    def layer_norm(self, name: str, size: int, eps: float) -> LayerNorm:
        """The normalisation ``name.weight`` and ``name.bias``."""
        return LayerNorm(self.dense(f"{name}.weight", size), self.dense(f"{name}.bias", size), eps)

    def norm_weight(self, name: str, size: int, offset: float) -> Tensor:
        """The weight of a norm with ``offset`` added to it in float32."""
        if offset == 0.0:
            return self.dense(name, size)
        exact = to_dense(self._load(name, (size,)), dataclasses.replace(self.form, dtype=torch.float32))
        tensor = (exact + offset).to(self.form.dtype)
        self.num_bytes += tensor.nbytes
        return tensor

    def linear(
        self,
        names: dict[str, int],
        num_inputs: int,
        has_bias: bool,
        *,
        transposed: bool = False,
        row_order: dict[str, npt.NDArray[np.int64]] | None = None,
    ) -> Linear:
        """One map out of several: name to number of outputs, side by side in this order.

        With ``transposed`` the checkpoint has the weights as inputs by outputs. ``row_order`` says for some names
        which stored output becomes each output.
        """
        parts, biases = [], []
        for name, size in names.items():
            shape = (num_inputs, size) if transposed else (size, num_inputs)
            part = self._load(f"{name}.weight", shape)
            if transposed:
                part = to_dense(part, self.form).t().contiguous()
            order = (row_order or {}).get(name)
            parts.append(part if order is None else take_rows(part, order))
            if has_bias:
                bias = self.dense(f"{name}.bias", size)
                biases.append(bias if order is None else bias[torch.from_numpy(order)])
        weights = make_weights(parts, self.form)
        self.num_bytes += sum(weight.num_bytes for weight in weights)
        linear = self._make_linear(weights, torch.cat(biases) if biases else None)
        starts = itertools.accumulate(names.values(), initial=0)
        for (name, size), start in zip(names.items(), starts, strict=False):
            self.maps[name] = MapPart(linear, start, size, num_inputs, (row_order or {}).get(name))
        return linear

    def head(self, name: str, embedding: Embedding, is_tied: bool) -> Linear:
        """The map from hidden states to logits: of its own, or the embedding's."""
        if is_tied:
            return self.tied_head(embedding, name)
        vocab_size, hidden_size = embedding.table_VD.shape
        return self.linear({name: vocab_size}, hidden_size, has_bias=False)

    def embedding(self, name: str, vocab_size: int, hidden_size: int) -> Embedding:
        """The table ``name.weight``; it stays in blocks where the format computes with packed blocks."""
        part = self._load(f"{name}.weight", (vocab_size, hidden_size))
        [weight] = make_weights([part], self.form)
        table_VD = weight.packed if isinstance(weight, BlockWeight) else to_dense(part, self.form)
        self.num_bytes += table_VD.nbytes if isinstance(table_VD, Tensor) else table_VD.num_bytes
        return Embedding(table_VD)

    def tied_head(self, embedding: Embedding, name: str) -> Linear:
        """The map from hidden states to logits that shares the weights of ``embedding``.

        A checkpoint may hold them a second time as ``name.weight``, but not other ones.
        """
        table_VD = embedding.table_VD
        if self.has(f"{name}.weight"):
            own_VD = self._load(f"{name}.weight", tuple(table_VD.shape))
            self.num_parameters -= table_VD.shape[0] * table_VD.shape[1]
            if not torch.equal(to_dense(own_VD, self.form), _unpacked(table_VD)):
                raise CheckpointError(
                    f"{name}.weight differs from the embedding, but the config says tie_word_embeddings"
                )
        return Linear([BlockWeight(table_VD) if isinstance(table_VD, PackedBlocks) else DenseWeight(table_VD)])

    def leave_out(self, prefix: str) -> None:
        """Let the checkpoint have tensors whose names begin like this."""
        self._used.update(name for name in self._names if name.startswith(prefix))

    def finish(self) -> None:
        """Complain about tensors that the model did not ask for."""
        if self._source.is_dummy:
            return
        unexpected = sorted(name for name in self._names - self._used if not HARMLESS.search(name))
        if unexpected:
            shown = "; ".join(self._found(name) for name in unexpected[:5]) + ("; ..." if len(unexpected) > 5 else "")
            raise CheckpointError(f"{len(unexpected)} tensors that this architecture does not have: {shown}")

    def _found(self, name: str) -> str:
        kind, shape = self._source.describe(name)
        return f"{name}: expected none, found {kind} of shape {list(shape)}"

    def _load(self, name: str, shape: tuple[int, ...]) -> Part:
        part = self._take(name, shape)
        if isinstance(part, Tensor) and not part.is_floating_point():
            raise CheckpointError(f"tensor {name} is {_type_name(part)}; expected floating-point numbers")
        self.num_parameters += math.prod(shape)
        return part

    def _take(self, name: str, shape: tuple[int, ...]) -> Part:
        if not self._source.is_dummy and name not in self._names:
            raise CheckpointError(f"tensor {name} is missing; expected one of shape {list(shape)}")
        part = self._source.load(name, shape)
        if tuple(part.shape) != shape:
            raise CheckpointError(f"tensor {name} has shape {list(part.shape)}; expected {list(shape)}")
        self._used.add(name)
        return part


def _type_name(part: Part) -> str:
    return part.kind if isinstance(part, BlockTensor) else str(part.dtype).removeprefix("torch.")


def take_rows(part: Part, order: npt.NDArray[np.int64]) -> Part:
    """The rows of a matrix in another order."""
    if isinstance(part, BlockTensor):
        return BlockTensor(part.kind, part.shape, part.data[order])
    return part[torch.from_numpy(order)]


def _unpacked(table_VD: Tensor | PackedBlocks) -> Tensor:
    return table_VD.unpack() if isinstance(table_VD, PackedBlocks) else table_VD
