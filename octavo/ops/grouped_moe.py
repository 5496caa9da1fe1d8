"""Mixture of experts whose weights are packed groups.

Shapes: T tokens, D model, X experts, S chosen for a token, F the width of an expert.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from octavo.ops.dispatch import op
from octavo.ops.grouped_linear import TILE, PackedGroups
from octavo.ops.linear import Activation, linear
from octavo.ops.moe import ClampedSwish, sum_over_experts


class GroupedExperts(NamedTuple):
    """The weights of all experts of a layer, one expert's rows after the other's."""

    num_experts: int
    gate_up: PackedGroups
    """[X 2 F, D]: each expert's F gates, then its F ups; 2 F and D are multiples of 16."""
    down: PackedGroups
    """[X D, F]"""
    activation: Activation | ClampedSwish = "silu"
    gate_up_bias: Tensor | None = None
    """[X, 2 F]"""
    down_bias: Tensor | None = None
    """[X, D]"""


def join_experts(parts: list[PackedGroups]) -> PackedGroups | None:
    """Experts' weights one after the other; ``None`` where they differ in form or do not end with a whole tile."""
    first = parts[0]
    forms = {(part.number, part.shape, part.group, part.zeros_GN is None, part.minima_GN is None) for part in parts}
    if len(forms) > 1 or first.shape[0] % TILE or any(part.order_K is not None for part in parts):
        return None
    return PackedGroups(
        first.number,
        (first.shape[0] * len(parts), first.shape[1]),
        torch.cat([part.words for part in parts]),
        _joined([part.scales_GN for part in parts]),
        None if first.zeros_GN is None else _joined([part.zeros_GN for part in parts if part.zeros_GN is not None]),
        None if first.minima_GN is None else _joined([part.minima_GN for part in parts if part.minima_GN is not None]),
    )


def _joined(scales: list[Tensor]) -> Tensor:
    """Numbers [G, N] of several weights, in float32 if their types differ."""
    dtype = scales[0].dtype if len({part.dtype for part in scales}) == 1 else torch.float32
    return torch.cat([part.to(dtype) for part in scales], dim=1)


@op
def grouped_moe(
    x_TD: Tensor, ids_TS: Tensor, shares_TS: Tensor, experts: GroupedExperts, residual_TD: Tensor | None = None
) -> Tensor:
    """``ops.moe`` with weights as in ``ops.grouped_linear``."""

    def expert(index: int, x_RD: Tensor) -> Tensor:
        gate_up, down = (_own(packed, index, experts.num_experts, x_RD) for packed in (experts.gate_up, experts.down))
        up_bias, down_bias = (None if b is None else b[index] for b in (experts.gate_up_bias, experts.down_bias))
        if isinstance(experts.activation, ClampedSwish):
            gated_RF = experts.activation(linear(x_RD, gate_up, up_bias))
        else:
            gated_RF = linear(x_RD, gate_up, up_bias, activation=experts.activation)
        return linear(gated_RF, down, down_bias)

    return sum_over_experts(x_TD, ids_TS, shares_TS, experts.num_experts, expert, residual_TD)


def _own(packed: PackedGroups, index: int, count: int, like: Tensor) -> Tensor:
    rows = packed.shape[0] // count
    return packed.rows(torch.arange(index * rows, (index + 1) * rows, device=like.device)).to(like.dtype)
