"""The tensors of a checkpoint by name, with a record of which ones were read."""

from __future__ import annotations

import re
from typing import Protocol

import torch
from torch import Tensor

from octavo.errors import CheckpointError
from octavo.weights.blocks import BlockTensor

Part = Tensor | BlockTensor
"""A tensor as stored in a file. Only matrices can be block-quantised."""

HARMLESS = re.compile(r"(^|\.)(rotary_emb\.inv_freq|h\.\d+\.attn\.(masked_)?bias)$")
"""Redundant buffers that some exporters write: rotary frequencies and GPT-2's causal masks."""


class Source(Protocol):
    """The part of the ``Checkpoint`` interface that loading weights needs."""

    @property
    def is_dummy(self) -> bool: ...

    def names(self) -> set[str]: ...

    def describe(self, name: str) -> tuple[str, tuple[int, ...]]: ...

    def load(self, name: str, shape: tuple[int, ...]) -> Part: ...


class Tensors:
    """Reads tensors and records which were read. Methods raise ``CheckpointError`` naming the tensor."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self.names = source.names()
        self._used: set[str] = set()

    def has(self, name: str) -> bool:
        """Whether the checkpoint has this tensor."""
        return name in self.names

    def load(self, name: str, shape: tuple[int, ...]) -> Part:
        """A floating-point or block-quantised tensor of this shape."""
        part = self._take(name, shape)
        if isinstance(part, Tensor) and not part.is_floating_point():
            raise CheckpointError(f"tensor {name} is {_type_name(part)}; expected floating-point numbers")
        return part

    def numbers(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """A floating-point tensor of this shape."""
        part = self.load(name, shape)
        if isinstance(part, BlockTensor):
            raise CheckpointError(f"tensor {name} is {part.kind}; expected floating-point numbers")
        return part

    def typed(self, name: str, shape: tuple[int, ...], *dtypes: torch.dtype) -> Tensor:
        """A tensor of this shape and one of these dtypes, for formats that use several tensors per matrix."""
        part = self._take(name, shape)
        if not isinstance(part, Tensor) or part.dtype not in dtypes:
            allowed = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            raise CheckpointError(f"tensor {name} is {_type_name(part)}; expected {allowed}")
        return part

    def leave_out(self, prefix: str) -> None:
        """Ignore tensors whose names start with ``prefix``."""
        self._used.update(name for name in self.names if name.startswith(prefix))

    def finish(self) -> None:
        """Refuse a checkpoint with unread tensors."""
        if self._source.is_dummy:
            return
        unexpected = sorted(name for name in self.names - self._used if not HARMLESS.search(name))
        if unexpected:
            shown = "; ".join(self._found(name) for name in unexpected[:5]) + ("; ..." if len(unexpected) > 5 else "")
            raise CheckpointError(f"{len(unexpected)} tensors that this architecture does not have: {shown}")

    def _found(self, name: str) -> str:
        kind, shape = self._source.describe(name)
        return f"{name}: expected none, found {kind} of shape {list(shape)}"

    def _take(self, name: str, shape: tuple[int, ...]) -> Part:
        if not self._source.is_dummy and name not in self.names:
            raise CheckpointError(f"tensor {name} is missing; expected one of shape {list(shape)}")
        part = self._source.load(name, shape)
        if tuple(part.shape) != shape:
            raise CheckpointError(f"tensor {name} has shape {list(part.shape)}; expected {list(shape)}")
        self._used.add(name)
        return part


def _type_name(part: Part) -> str:
    return part.kind if isinstance(part, BlockTensor) else str(part.dtype).removeprefix("torch.")
