"""FP8 weights of 8 bits (e4m3) with float scales: ``weight`` times ``weight_scale`` or ``weight_scale_inv``.

``quant_method`` "fp8" is the format of DeepSeek-V3, of transformers and of vLLM: a scale for a tensor, or for each
block of ``weight_block_size``. Despite its name, ``weight_scale_inv`` is multiplied. "fbgemm_fp8", of Llama 3.1, has a
scale for each output.

Matrices of bytes of integers are two numbers of 4 bits each, as in MXFP4: those of DeepSeek-V4's experts.

Kernels may round activations to FP8 as well, with a scale for each token that they compute: those of the checkpoint
(``input_scale``), one for all tokens, are not used, which is more precise.

Shapes: K inputs, N outputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from octavo.quant.checkpoint_tensors import FLOATS, Tensors
from octavo.quant.config_reader import QuantKeys
from octavo.quant.formats.plain import Plain
from octavo.quant.stored.dummy_weights import dummy_scaled, is_quantised_dummy
from octavo.quant.stored.float4 import read_mxfp4
from octavo.quant.stored.scaled import ScaledStored
from octavo.quant.stored.stored_weight import StoredWeight

SCALE_NAMES = ("weight_scale_inv", "weight_scale")
SCALE_DTYPES = (*FLOATS, torch.float8_e8m0fnu)


@dataclass(frozen=True)
class FP8(Plain):
    """Modules whose weight is floating-point numbers without a scale are unquantised."""

    block: tuple[int, int] | None
    """``weight_block_size``: rows and columns."""
    kept: tuple[str, ...] = ()
    """``modules_to_not_convert``; used for random weights alone."""

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> FP8:
        """Read a ``quantization_config``. Raises ``CheckpointError``."""
        keys = QuantKeys(values)
        fmt = keys.get("fmt", "e4m3")
        if fmt not in ("e4m3", "float8_e4m3fn"):
            raise keys.wrong("fmt", "e4m3")
        keys.word("activation_scheme", ("dynamic", "static"), "dynamic")
        return cls(keys.pair("weight_block_size"), keys.names("modules_to_not_convert") + keys.names("ignored_layers"))

    def matrix(self, name: str, shape: tuple[int, int], tensors: Tensors, is_transposed: bool) -> StoredWeight:
        if is_quantised_dummy(name, self.kept, tensors):
            return dummy_scaled(name, shape, self.block or shape, True, tensors)
        scale_names = [scale for scale in SCALE_NAMES if tensors.has(f"{name}.{scale}")]
        if not scale_names and not tensors.needs_scales(f"{name}.weight"):
            return super().matrix(name, shape, tensors, is_transposed)
        scale_name = scale_names[0] if scale_names else SCALE_NAMES[self.block is None]
        if tensors.dtype(f"{name}.weight") == torch.int8:
            return read_mxfp4(name, shape, tensors, "weight", scale_name)
        return read_fp8(name, shape, tensors, scale_name, self.block, rounds_activations=True)


def read_fp8(
    name: str,
    shape: tuple[int, int],
    tensors: Tensors,
    scale_name: str,
    block: tuple[int, int] | None,
    rounds_activations: bool,
) -> ScaledStored:
    """Module ``name``, with scales for blocks, or else one for each output or for the tensor."""
    N, K = shape
    values_NK = tensors.typed(f"{name}.weight", shape, torch.float8_e4m3fn)
    tensors.leave_out_activation_scales(name)
    whole = ((1,), (), (1, 1))
    if block is not None:
        height, width = block
        rows, columns = -(-N // height), -(-K // width)
        shapes = ((rows, columns), (rows, 1, columns, 1), *(whole if rows == columns == 1 else ()))
    else:
        shapes = (*whole, (N, 1), (N,))
    scales = tensors.scales(f"{name}.{scale_name}", *shapes, dtypes=SCALE_DTYPES)
    if block is None:
        block = (N, K) if scales.numel() == 1 else (1, K)
        return ScaledStored(values_NK, scales.reshape(-1, 1), block, rounds_activations)
    return ScaledStored(values_NK, scales.reshape(rows, columns), block, rounds_activations)
