"""Quantised weights packed for the kernels of CUDA devices.

Shapes: T tokens, K inputs, N outputs, G groups of K / G inputs.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from octavo.ops.dispatch import REFERENCE
from octavo.ops.linear.grouped_linear import HALF, WORDS, Number, PackedGroups, grouped_linear, takes_groups
from octavo.quant.stored.stored_weight import PackedWeight, WeightFormat

LARGEST_SCALE = 2.0**17
"""Of floating-point numbers: kernels multiply scales by what makes up for the numbers' exponents, in bfloat16."""


class GroupedWeight(PackedWeight[PackedGroups]):
    """A weight packed for ``ops.grouped_linear``."""

    product = grouped_linear


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
    if number in ("e4m3", "e2m1") and not scales_NG.is_meta and bool(scales_NG.abs().max() > LARGEST_SCALE):
        return None
    group_of, is_same = torch.arange(0, K, length) // group, length == min(group, K)

    def divided(part_NG: Tensor) -> Tensor:
        part_NG = part_NG.to(device)
        return part_NG if is_same else part_NG.index_select(1, group_of.to(device))

    zeros_NG = None if zeros_NG is None else divided(zeros_NG)
    minima_NG = None if minima_NG is None else divided(minima_NG)
    order_K = None if order_K is None else order_K.to(device)
    return PackedGroups.pack(number, codes_NK.to(device), divided(scales_NG), zeros_NG, order_K, minima_NG)
