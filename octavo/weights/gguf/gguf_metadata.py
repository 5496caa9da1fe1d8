"""Reads a GGUF file's metadata under its architecture's prefix key by key, so that none is silently ignored."""

from __future__ import annotations

import logging
import math
from typing import Any, NoReturn

import numpy as np

from octavo.errors import CheckpointError
from octavo.weights.gguf.gguf_reader import GGUFFile

logger = logging.getLogger(__name__)

WITHOUT_EFFECT = {"tensor_data_layout", "rope.scaling.finetuned"}


class Metadata:
    """Keys are given without the prefix. Every method raises ``CheckpointError`` naming the full key."""

    def __init__(self, file: GGUFFile, prefix: str) -> None:
        self.file = file
        self.prefix = prefix
        self._read: set[str] = set()

    def has(self, key: str) -> bool:
        """Whether the key is present."""
        return self.prefix + key in self.file.metadata

    def get(self, key: str, default: Any = None) -> Any:
        """The raw value."""
        self._read.add(key)
        return self.file.metadata.get(self.prefix + key, default)

    def count(self, key: str, default: int | None = None, low: int = 1) -> int:
        """An integer from ``low`` to 2**31 - 1; required if there is no default."""
        value = self.get(key, default)
        if type(value) is not int or not low <= value < 1 << 31:
            self.fail(key, f"is {str(value)[:100]}, expected an integer from {low} to 2**31 - 1")
        return value

    def counts(self, key: str, num_layers: int) -> list[int]:
        """An integer from 0 for each layer: an array, or one for all of them."""
        value = self.get(key)
        values = value.tolist() if isinstance(value, np.ndarray) else [value] * num_layers
        if len(values) < num_layers or not all(type(count) is int and 0 <= count < 1 << 31 for count in values):
            self.fail(key, f"is {str(value)[:100]}, expected integers from 0 to 2**31 - 1 for {num_layers} layers")
        return values[:num_layers]

    def array(self, key: str) -> list[Any]:
        """An array of numbers or truth values, empty if there is none."""
        value = self.get(key, ())
        if isinstance(value, np.ndarray):
            value = value.tolist()
        if not isinstance(value, list | tuple) or not all(isinstance(item, int | float) for item in value):
            self.fail(key, f"is {str(value)[:100]}, expected an array of numbers")
        return list(value)

    def flags(self, key: str, num_layers: int) -> list[bool]:
        """True or false, or 1 or 0, for each layer."""
        value = self.get(key)
        if not isinstance(value, np.ndarray) or len(value) < num_layers or not set(value.tolist()) <= {0, 1}:
            self.fail(key, f"is {str(value)[:100]}, expected true or false for {num_layers} layers")
        return [bool(each) for each in value[:num_layers]]

    def real(self, key: str, default: float | None = None, low: float | None = None) -> float:
        """A positive number, or one from ``low`` on; required if there is no default."""
        value = self.get(key, default)
        if type(value) is not float or not (0 < value < math.inf or value == low):
            self.fail(key, f"is {str(value)[:100]}, expected a positive number")
        return value

    def flag(self, key: str, default: bool) -> bool:
        """True or false."""
        value = self.get(key, default)
        if type(value) is not bool:
            self.fail(key, f"is {str(value)[:100]}, expected true or false")
        return value

    def floats(self, tensor: str, count: int) -> list[float]:
        """The numbers of a float32 tensor of this length, such as the factors of a rotary embedding."""
        found = self.file.tensors[tensor]
        if found.kind != "F32" or found.shape != (count,):
            raise CheckpointError(
                f"{self.file.path}: tensor {tensor!r}: is {found.kind} {found.shape}, expected F32 {(count,)}"
            )
        numbers: list[float] = self.file.data(tensor).view("<f4").tolist()
        return numbers

    def rows(self, tensor: str) -> int:
        """The rows of a tensor, which must be there."""
        if (found := self.file.tensors.get(tensor)) is None:
            raise CheckpointError(f"{self.file.path}: there is no tensor {tensor!r}")
        return found.shape[0]

    def fail(self, key: str, problem: str) -> NoReturn:
        """Raise the error for a key."""
        raise CheckpointError(f"{self.file.path}: metadata {self.prefix + key!r}: {problem}")

    def finish(self) -> None:
        """Refuse an unread key, because it may change what the model computes. One that is zero, false or empty turns
        something off that is off here, and is named in a warning."""
        if not self.flag("attention.causal", True):
            self.fail("attention.causal", "must be true: tokens that see later ones are computed by encoders alone")
        for key, value in self.file.metadata.items():
            name = key.removeprefix(self.prefix)
            if not key.startswith(self.prefix) or name in self._read | WITHOUT_EFFECT:
                continue
            if not (value if isinstance(value, bool | int | float | str) else any(value)):
                logger.warning("%s: metadata %r is not known, and is %r", self.file.path, key, value)
                continue
            self.fail(name[:100], "this key is not known, and may change what the model computes")
