"""BitNet b1.58 (arXiv 2402.17764): matrices of -1, 0 and 1 with one scale, as transformers writes them.

``weight`` uint8 [N / 4, K] holds four rows of codes from 0 to 2, which are the numbers plus one: bits ``2 i`` and
``2 i + 1`` of row r are those of row ``i N / 4 + r``. ``linear_class`` "bitlinear" divides by ``weight_scale``,
"autobitlinear" multiplies by it, and may store the numbers -1, 0 and 1 unpacked. With ``quantization_mode`` "online"
matrices are unquantised, and rounded when they are read: to multiples of the mean of their absolute values.

Shapes: K inputs, N outputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from octavo.quant.checkpoint_tensors import Tensors
from octavo.quant.config_reader import QuantKeys
from octavo.quant.formats.plain import Plain
from octavo.quant.module_matching import names_module
from octavo.quant.stored.dummy_weights import UNQUANTISED, dummy_grouped, is_quantised_dummy
from octavo.quant.stored.int_group_weight import GroupedStored
from octavo.quant.stored.stored_weight import StoredWeight

BITS = 2


@dataclass(frozen=True)
class BitNet(Plain):
    """Modules without ``weight_scale`` are unquantised, unless matrices are rounded when they are read."""

    divides: bool
    """Whether numbers are divided by the scale."""
    is_online: bool
    kept: tuple[str, ...] = ()
    """``modules_to_not_convert``."""

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> BitNet:
        """Read a ``quantization_config``. Raises ``CheckpointError``."""
        keys = QuantKeys(values)
        is_auto = keys.word("linear_class", ("bitlinear", "autobitlinear"), "bitlinear") == "autobitlinear"
        is_online = keys.word("quantization_mode", ("offline", "online"), "offline") == "online" and is_auto
        keys.refuse("use_rms_norm", "a norm of each matrix's inputs")
        return cls(not is_auto, is_online, keys.names("modules_to_not_convert"))

    def matrix(self, name: str, shape: tuple[int, int], tensors: Tensors, is_transposed: bool) -> StoredWeight:
        (N, K), weight, scale = shape, f"{name}.weight", f"{name}.weight_scale"
        if is_quantised_dummy(name, self.kept, tensors):
            return replace(dummy_grouped(name, shape, BITS, 1, False, tensors), rounds_activations=True)
        if self.is_online and not names_module((*UNQUANTISED, *self.kept), name):
            numbers_NK = tensors.numbers(weight, shape).float()
            mean = numbers_NK.abs().mean().clamp(min=1e-5)
            return _ternary((numbers_NK / mean).round().clamp(-1, 1).to(torch.int8), mean)
        if not tensors.has(scale):
            return super().matrix(name, shape, tensors, is_transposed)
        step = tensors.scales(scale, (1,), ())
        if tensors.dtype(weight) == torch.uint8:
            packed = tensors.typed(weight, (-(-N // 4), K), torch.uint8)
            codes_NK = torch.cat([(packed >> 2 * i) & 3 for i in range(4)])[:N].to(torch.int8) - 1
        else:
            codes_NK = tensors.numbers(weight, shape).to(torch.int8)
        tensors.check(codes_NK.abs() <= 1, f"tensor {weight} has numbers other than -1, 0 and 1")
        return _ternary(codes_NK, 1 / step if self.divides else step)


def _ternary(codes_NK: Tensor, scale: Tensor) -> GroupedStored:
    scales_N1 = scale.reshape(1, 1).expand(len(codes_NK), 1).contiguous()
    return GroupedStored(codes_NK, scales_N1, None, BITS, rounds_activations=True)
