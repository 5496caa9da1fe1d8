"""Checkpoints in memory, for reading single modules."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor


class InMemory:
    """Tensors by name, as a ``Source``."""

    is_dummy = False

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = dict(tensors)

    def names(self) -> set[str]:
        return set(self.tensors)

    def describe(self, name: str) -> tuple[str, tuple[int, ...]]:
        return str(self.tensors[name].dtype), tuple(self.tensors[name].shape)

    def load(self, name: str, shape: tuple[int, ...]) -> Tensor:
        return self.tensors[name]


def module(name: str, tensors: Mapping[str, Tensor]) -> InMemory:
    """A checkpoint of one module, whose tensors are given by their names in it."""
    return InMemory({f"{name}.{part}": tensor for part, tensor in tensors.items()})
