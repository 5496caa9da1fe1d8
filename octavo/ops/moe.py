"""Mixture of experts: the selected experts of any number of tokens.

Shapes: T tokens, D model, X experts, S chosen for a token, F the width of an expert.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from octavo.ops.dispatch import op
from octavo.ops.elementwise import sigmoid
from octavo.ops.linear import Activation, linear


class ClampedSwish(NamedTuple):
    """The gate of gpt-oss: ``min(gate, limit) * sigmoid(alpha * gate) * (up + 1)``, ups within ``limit`` of zero."""

    alpha: float
    limit: float

    def __call__(self, gate_up: Tensor) -> Tensor:
        wide = gate_up.to(torch.promote_types(gate_up.dtype, torch.float32))
        gate, up = wide.chunk(2, dim=-1)
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return (gate * sigmoid(self.alpha * gate) * (up + 1)).to(gate_up.dtype)


class Experts(NamedTuple):
    """The weights of all experts of a layer, dense and of one dtype."""

    gate_up: Tensor
    """[X, 2 F, D]: each expert's F gates, then its F ups."""
    down: Tensor
    """[X, D, F]"""
    activation: Activation | ClampedSwish = "silu"
    gate_up_bias: Tensor | None = None
    """[X, 2 F]"""
    down_bias: Tensor | None = None
    """[X, D]"""


@op
def moe(x_TD: Tensor, ids_TS: Tensor, shares_TS: Tensor, experts: Experts, residual_TD: Tensor | None = None) -> Tensor:
    """For each token, ``residual`` plus the sum over its experts of ``share * down(act(gate(x)) * up(x))``.

    ``ids`` are int64, distinct within a row; ``shares`` are the float32 routing weights. Each expert's rows are
    computed together; a row is summed in float32 at least, in an order that does not depend on the other rows. The
    result has x's dtype; ``residual``, which shares no memory with x, may be overwritten and returned.
    """
    return sum_over_experts(
        x_TD, ids_TS, shares_TS, len(experts.gate_up), lambda i, rows: _expert(rows, i, experts), residual_TD
    )


def sum_over_experts(
    x_TD: Tensor,
    ids_TS: Tensor,
    shares_TS: Tensor,
    count: int,
    expert: Callable[[int, Tensor], Tensor],
    residual_TD: Tensor | None = None,
) -> Tensor:
    """``moe`` for ``count`` experts of any kind: ``expert(i, rows)`` is expert i's result for rows [R, D]."""
    S = ids_TS.shape[1]
    order = ids_TS.flatten().argsort(stable=True)
    counts = torch.bincount(ids_TS.flatten(), minlength=count).tolist()
    wide = torch.promote_types(x_TD.dtype, torch.float32)
    sum_TD = torch.zeros(x_TD.shape, dtype=wide, device=x_TD.device)
    shares = shares_TS.flatten().to(wide)
    for i, places in enumerate(torch.split(order, counts)):
        if len(places):
            tokens = places // S
            rows = expert(i, x_TD[tokens]).to(wide)
            sum_TD.index_add_(0, tokens, rows * shares[places].unsqueeze(1))
    return sum_TD.to(x_TD.dtype) if residual_TD is None else residual_TD.add_(sum_TD)


def _expert(x_RD: Tensor, index: int, experts: Experts) -> Tensor:
    up_bias, down_bias = (None if b is None else b[index] for b in (experts.gate_up_bias, experts.down_bias))
    if isinstance(experts.activation, ClampedSwish):
        gated_RF = experts.activation(linear(x_RD, experts.gate_up[index], up_bias))
    else:
        gated_RF = linear(x_RD, experts.gate_up[index], up_bias, activation=experts.activation)
    return linear(gated_RF, experts.down[index], down_bias)
