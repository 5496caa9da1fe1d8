"""Quantisation methods: which tensors of a checkpoint hold each matrix, and in which format.

Each method is one module of ``formats``; ``METHODS`` maps its name in ``quantization_config``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from octavo.errors import CheckpointError
from octavo.quant.checkpoint_tensors import Tensors
from octavo.quant.config_reader import INSTEAD
from octavo.quant.formats.auto_round import read_auto_round
from octavo.quant.formats.awq import AWQ
from octavo.quant.formats.bitnet import BitNet
from octavo.quant.formats.bitsandbytes import BitsAndBytes
from octavo.quant.formats.compressed_tensors import CompressedTensors
from octavo.quant.formats.fp8 import FP8
from octavo.quant.formats.gptq import GPTQ
from octavo.quant.formats.modelopt import ModelOpt
from octavo.quant.formats.mxfp4 import MXFP4
from octavo.quant.formats.plain import PLAIN, Plain
from octavo.quant.stored.stored_weight import StoredWeight


class QuantMethod(Protocol):
    """Finds the tensors that hold a matrix, by module name.

    A method reads tensors through ``tensors``, which refuses a checkpoint with unread tensors once the model is
    complete. It is called with each module's name, because modules may be stored differently. Rules by name apply to a
    module if they match any of ``tensors.names_of``.
    """

    @property
    def has_fp8_cache_scales(self) -> bool:
        """Whether scales of keys and values, if the checkpoint has any, are for a cache of FP8 numbers."""
        ...

    def matrix(self, name: str, shape: tuple[int, int], tensors: Tensors, is_transposed: bool) -> StoredWeight:
        """The matrix [N, K] of module ``name``. Raises ``CheckpointError``.

        ``is_transposed``: checkpoints of the architecture store unquantised matrices as [inputs, outputs].
        """
        ...

    def stack(
        self, name: str, shape: tuple[int, int, int], tensors: Tensors, is_transposed: bool
    ) -> Sequence[StoredWeight]:
        """The matrices [X, N, K] that the checkpoint stacks under ``name``."""
        ...


METHODS: Mapping[str, Callable[[Mapping[str, Any]], QuantMethod]] = {
    "auto-round": read_auto_round,
    "awq": AWQ.read,
    "bitnet": BitNet.read,
    "bitsandbytes": BitsAndBytes.read,
    "compressed-tensors": CompressedTensors.read,
    "fbgemm_fp8": FP8.read,
    "fp8": FP8.read,
    "gptq": GPTQ.read,
    "intel/auto-round": read_auto_round,
    "modelopt": ModelOpt.read,
    "modelopt_fp4": ModelOpt.read,
    "modelopt_mixed": ModelOpt.read,
    "mxfp4": MXFP4.read,
}
"""Name of a method to the function that reads its configuration."""


def weights_method(given: object) -> str | None:
    """How weights are quantised, as a ``quantization_config`` names it; ``None`` if they are not.

    It may be about cached keys and values alone. What cannot be read counts as quantised: ``read_method`` says what is
    wrong.
    """
    try:
        if type(read_method(given)) is Plain:
            return None
    except CheckpointError:
        pass
    return str(given.get("quant_method", "unknown")) if isinstance(given, Mapping) else "unknown"


def read_method(given: object) -> QuantMethod:
    """The method named in a ``quantization_config``; ``None`` means a checkpoint without quantisation.

    Raises ``CheckpointError`` for an unsupported method.
    """
    if given is None:
        return PLAIN
    if not isinstance(given, Mapping):
        raise CheckpointError(f"config: quantization_config is {given!r}; it must be an object")
    name = given.get("quant_method")
    if not isinstance(name, str) or name not in METHODS:
        raise CheckpointError(
            f"config: quantization_config.quant_method is {name!r}; it must be one of {', '.join(METHODS)}. {INSTEAD}"
        )
    return METHODS[name](given)
