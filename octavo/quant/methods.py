"""How a checkpoint stores its matrices: which tensors each is made of, and in which form.

A method is one module of this folder; ``METHODS`` has its name in ``quantization_config``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from octavo.errors import CheckpointError
from octavo.quant.mxfp4 import MXFP4
from octavo.quant.plain import PLAIN
from octavo.quant.stored import StoredWeight
from octavo.quant.tensors import Tensors


class QuantMethod(Protocol):
    """From the name of a matrix to the tensors that hold it.

    What a method reads it reads through ``tensors``, which refuses what is left over when the model is complete. It is
    asked for each module by name, so that some modules may be stored in another way than others.
    """

    def matrix(self, name: str, shape: tuple[int, int], tensors: Tensors, is_transposed: bool) -> StoredWeight:
        """The matrix [N, K] of module ``name``.

        ``is_transposed`` says that the architecture has plain numbers as inputs by outputs. Raises ``CheckpointError``.
        """
        ...

    def stack(
        self, name: str, shape: tuple[int, int, int], tensors: Tensors, is_transposed: bool
    ) -> Sequence[StoredWeight]:
        """The matrices [X, N, K] that the checkpoint holds together under ``name``."""
        ...


METHODS: Mapping[str, Callable[[Mapping[str, Any]], QuantMethod]] = {"mxfp4": MXFP4.read}
"""What reads the configuration of a method."""


def read_method(given: object) -> QuantMethod:
    """The method that a ``quantization_config`` names; ``None`` is a checkpoint without one.

    Raises ``CheckpointError`` for one that is not supported.
    """
    if given is None:
        return PLAIN
    if not isinstance(given, Mapping):
        raise CheckpointError(f"config: quantization_config is {given!r}; it must be an object")
    name = given.get("quant_method")
    if not isinstance(name, str) or name not in METHODS:
        raise CheckpointError(
            f"config: quantization_config.quant_method is {name!r}; it must be {' or '.join(METHODS)}. "
            "Use a checkpoint of this model that is not quantised, or a GGUF file of it"
        )
    return METHODS[name](given)
