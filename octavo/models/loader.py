"""Hands a model its weights by name, and makes sure that the checkpoint has those and no others.

Shapes: K inputs, N outputs, D model, V vocabulary.
"""

from __future__ import annotations

import re
from typing import Protocol

import torch
from torch import Tensor

from octavo.errors import CheckpointError
from octavo.layers.embedding import Embedding
from octavo.layers.linear import Linear
from octavo.layers.norm import RMSNorm
from octavo.quant.scheme import Part, WeightFormat, make_weights, to_dense
from octavo.weights.blocks import BlockTensor

HARMLESS = re.compile(r"(^|\.)rotary_emb\.inv_freq$")
"""Buffers that some exporters write; they are computed from the configuration."""


class Source(Protocol):
    """What is needed of a checkpoint."""

    @property
    def is_dummy(self) -> bool: ...

    def names(self) -> set[str]: ...

    def load(self, name: str, shape: tuple[int, ...]) -> Part: ...


class WeightLoader:
    """Loads weights by their Hugging Face names in the wanted format; every method raises ``CheckpointError``."""

    def __init__(self, source: Source, form: WeightFormat) -> None:
        self.form = form
        self.num_parameters = 0
        self.num_bytes = 0
        self._source = source
        self._names = source.names()
        self._used: set[str] = set()

    def has(self, name: str) -> bool:
        """Whether the checkpoint has this tensor."""
        return name in self._names

    def dense(self, name: str, *shape: int) -> Tensor:
        """One tensor, dense."""
        tensor = to_dense(self._load(name, shape), self.form)
        self.num_bytes += tensor.nbytes
        return tensor

    def norm(self, name: str, size: int, eps: float) -> RMSNorm:
        """The normalisation ``name.weight``."""
        return RMSNorm(self.dense(f"{name}.weight", size), eps)

    def linear(self, names: dict[str, int], num_inputs: int, has_bias: bool) -> Linear:
        """One map out of several: name to number of outputs, side by side in this order."""
        parts = [self._load(f"{name}.weight", (size, num_inputs)) for name, size in names.items()]
        weights = make_weights(parts, self.form)
        self.num_bytes += sum(weight.num_bytes for weight in weights)
        biases = [self.dense(f"{name}.bias", size) for name, size in names.items()] if has_bias else []
        return Linear(weights, torch.cat(biases) if biases else None)

    def embedding(self, name: str, vocab_size: int, hidden_size: int) -> Embedding:
        """The table ``name.weight``; it stays in blocks where the format computes with blocks."""
        table_VD = self._load(f"{name}.weight", (vocab_size, hidden_size))
        if self.form.scheme is None or isinstance(table_VD, Tensor):
            table_VD = to_dense(table_VD, self.form)
        self.num_bytes += table_VD.nbytes if isinstance(table_VD, Tensor) else table_VD.data.nbytes
        return Embedding(table_VD)

    def tied_head(self, embedding: Embedding, name: str) -> Linear:
        """The map from hidden states to logits that shares the weights of ``embedding``.

        A checkpoint may hold them a second time as ``name.weight``, but not other ones.
        """
        table_VD = embedding.table_VD
        if self.has(f"{name}.weight"):
            own_VD = self._load(f"{name}.weight", tuple(table_VD.shape))
            self.num_parameters -= table_VD.shape[0] * table_VD.shape[1]
            if not torch.equal(to_dense(own_VD, self.form), to_dense(table_VD, self.form)):
                raise CheckpointError(
                    f"{name}.weight differs from the embedding, but the config says tie_word_embeddings"
                )
        weights = make_weights([table_VD], self.form)
        if isinstance(table_VD, BlockTensor):
            self.num_bytes += sum(weight.num_bytes for weight in weights)
        return Linear(weights)

    def finish(self) -> None:
        """Complain about tensors that the model did not ask for."""
        if self._source.is_dummy:
            return
        unexpected = sorted(name for name in self._names - self._used if not HARMLESS.search(name))
        if unexpected:
            shown = ", ".join(unexpected[:5]) + (", ..." if len(unexpected) > 5 else "")
            raise CheckpointError(f"{len(unexpected)} tensors that this architecture does not have: {shown}")

    def _load(self, name: str, shape: tuple[int, ...]) -> Part:
        if not self._source.is_dummy and name not in self._names:
            raise CheckpointError(f"tensor {name} is missing; expected one of shape {list(shape)}")
        part = self._source.load(name, shape)
        if tuple(part.shape) != shape:
            raise CheckpointError(f"tensor {name} has shape {list(part.shape)}; expected {list(shape)}")
        self._used.add(name)
        count = 1
        for size in shape:
            count *= size
        self.num_parameters += count
        return part
