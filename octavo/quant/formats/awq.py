"""AWQ checkpoints (arXiv 2306.00978), in the "gemm" layout of AutoAWQ.

The tensors of a module::

    qweight  int32 [K, N / 8]   codes of 4 bits, packed along the outputs
    qzeros   int32 [G, N / 8]   zero points, likewise; absent without ``zero_point``
    scales   float [G, N]

An entry is ``(code - zero) * scale``. Of eight outputs, a word holds those of ``PACKED`` from its lowest bits on.

Shapes: K inputs, N outputs, G groups of inputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from octavo.errors import CheckpointError
from octavo.quant.checkpoint_tensors import Tensors
from octavo.quant.config_reader import QuantKeys
from octavo.quant.formats.plain import Plain
from octavo.quant.stored.dummy_weights import dummy_grouped, is_quantised_dummy
from octavo.quant.stored.groups import group_size, num_groups, signed, unpack_fields
from octavo.quant.stored.int_group_weight import GroupedStored
from octavo.quant.stored.stored_weight import StoredWeight

BITS = 4
PACKED = (0, 2, 4, 6, 1, 3, 5, 7)
GEMM = "gemm"


@dataclass(frozen=True)
class AWQ(Plain):
    """Modules without ``qweight`` are unquantised."""

    group: int
    has_zeros: bool = True
    kept: tuple[str, ...] = ()
    """``modules_to_not_convert``; used for random weights alone."""

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> AWQ:
        """Read a ``quantization_config``. Raises ``CheckpointError``."""
        keys = QuantKeys(values)
        keys.integer("w_bit" if keys.get("w_bit") is not None else "bits", (BITS,), BITS)
        version = keys.get("version", GEMM)
        if not isinstance(version, str) or version.lower() != GEMM:
            raise keys.wrong("version", GEMM, "Use a checkpoint of this model in that layout, which is the usual one")
        group_key = "q_group_size" if keys.get("q_group_size") is not None else "group_size"
        return cls(group_size(keys, group_key), keys.flag("zero_point", True), keys.names("modules_to_not_convert"))

    def matrix(self, name: str, shape: tuple[int, int], tensors: Tensors, is_transposed: bool) -> StoredWeight:
        N, K = shape
        if is_quantised_dummy(name, self.kept, tensors):
            return dummy_grouped(name, shape, BITS, num_groups(name, K, self.group), self.has_zeros, tensors)
        if not tensors.has(f"{name}.qweight"):
            return super().matrix(name, shape, tensors, is_transposed)
        if N % 8:
            raise CheckpointError(f"module {name} has {N} outputs; AWQ packs eight in a word")
        G = num_groups(name, K, self.group)
        codes_NK = _unpacked(tensors.typed(f"{name}.qweight", (K, N // 8), torch.int32))
        zeros_NG = None
        if tensors.has(f"{name}.qzeros"):
            zeros_NG = _unpacked(tensors.typed(f"{name}.qzeros", (G, N // 8), torch.int32))
        scales_NG = tensors.scales(f"{name}.scales", (G, N)).t().contiguous()
        return GroupedStored(codes_NK, scales_NG, zeros_NG, BITS)


def _unpacked(words: Tensor) -> Tensor:
    """Codes [N, rows] (int8) of words [rows, N / 8]."""
    rows, count = words.shape
    place_8 = torch.tensor(PACKED, device=words.device).argsort()
    fields = unpack_fields(words, BITS, 8 * count).view(rows, count, 8)[:, :, place_8]
    return signed(fields.flatten(1).t().contiguous(), BITS)
