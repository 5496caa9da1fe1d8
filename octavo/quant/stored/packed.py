"""Quantised weights packed for the kernels of CUDA devices.

Shapes: T tokens, K inputs, N outputs, G groups of K / G inputs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.ops.dispatch import REFERENCE
from octavo.ops.grouped_linear import HALF, WORDS, Number, PackedGroups, grouped_linear, takes_groups
from octavo.ops.linear import Activation
from octavo.quant.stored.stored_weight import WeightFormat


@dataclass(frozen=True, eq=False)
class GroupedWeight:
    """A weight packed for ``ops.grouped_linear``."""

    packed: PackedGroups
    dtype: torch.dtype
    """Of activations."""

    @property
    def format(self) -> str:
        return self.packed.format

    @property
    def num_bytes(self) -> int:
        return self.packed.num_bytes

    @property
    def dense_NK(self) -> Tensor | None:
        return None

    def apply(
        self,
        x_TK: Tensor,
        bias_N: Tensor | None = None,
        norm_K: Tensor | None = None,
        eps: float = 0.0,
        residual_TN: Tensor | None = None,
        activation: Activation | None = None,
    ) -> Tensor:
        return grouped_linear(x_TK, self.packed, bias_N, norm_K, eps, residual_TN, activation)

    def rows(self, ids_T: Tensor) -> Tensor:
        return self.packed.rows(ids_T).to(self.dtype)


def packs_groups(form: WeightFormat) -> bool:
    """Whether ``ops.grouped_linear`` has a kernel for this format; the reference would unpack at every call."""
    return form.packs and grouped_linear.chosen(form.kernel_device, form.dtype) != REFERENCE


def group_length(number: Number, K: int, group: int) -> int | None:
    """Length of the groups into which groups of ``group`` inputs are divided for kernels; ``None``: they take none.

    The last of the given groups may be shorter than the others.
    """
    if group >= K:
        return K
    length = math.gcd(group, K)
    shorter = (length, math.gcd(length, WORDS), math.gcd(length, HALF))
    return next((part for part in shorter if takes_groups(number, K, part)), None)


def pack_groups(
    number: Number,
    codes_NK: Tensor,
    scales_NG: Tensor,
    group: int,
    device: torch.device,
    zeros_NG: Tensor | None = None,
    order_K: Tensor | None = None,
    minima_NG: Tensor | None = None,
) -> PackedGroups | None:
    """Codes, one a byte, and scales of groups packed on the device; ``None`` if kernels do not take such groups."""
    K = codes_NK.shape[1]
    length = group_length(number, K, group)
    if length is None or (length == K and minima_NG is not None):
        return None
    group_of = torch.arange(0, K, length) // group
    scales_NG = scales_NG[:, group_of].to(device)
    zeros_NG = None if zeros_NG is None else zeros_NG[:, group_of].to(device)
    minima_NG = None if minima_NG is None else minima_NG[:, group_of].to(device)
    order_K = None if order_K is None else order_K.to(device)
    return PackedGroups.pack(number, codes_NK.to(device), scales_NG, zeros_NG, order_K, minima_NG)
