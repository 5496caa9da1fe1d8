"""Layers of Mamba-2 (arXiv 2405.21060).

Shapes: T tokens, D model, C channels of the convolution, W its width, N heads, P numbers of a head.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from octavo import ops
from octavo.layers.linear import Linear
from octavo.layers.norm import RMSNorm
from octavo.ops.attention import LayerCache, PagedRows
from octavo.ops.state_space import StateSpaceHeads


class GatedNorm(NamedTuple):
    """RMSNorm of groups of ``width`` columns, with gates that multiply its input, or its output."""

    weight_C: Tensor
    eps: float
    width: int
    is_gated_first: bool = True

    def __call__(self, x_TC: Tensor, gate_TC: Tensor) -> Tensor:
        return ops.gated_norm(
            x_TC, gate_TC, self.weight_C, self.eps, self.width, "silu", is_gated_first=self.is_gated_first
        )


class Mamba2:
    """``gated_norm(ssm(conv(x, b, c), dt), z)``, where ``z, x, b, c, dt`` are the columns of the projections, if there
    are ``scales`` times them. Without a norm, outputs are multiplied by ``silu(z)``."""

    def __init__(
        self,
        norm: RMSNorm,
        projections: Linear,
        conv: tuple[Tensor, Tensor | None],
        heads: StateSpaceHeads,
        gated_norm: GatedNorm | None,
        scales_W: Tensor | None = None,
    ) -> None:
        self.norm = norm
        self.projections = projections
        self.conv_WC, self.bias_C = conv
        self.heads = heads
        self.gated_norm = gated_norm
        self.scales_W = scales_W
        self.sizes = [heads.num_heads * heads.head_dim, sum(heads.sizes), heads.num_heads]

    def __call__(self, x_TD: Tensor, cache: LayerCache, rows: PagedRows) -> Tensor:
        """A new tensor [T, N P]."""
        projected_TW = self.projections(x_TD, norm=self.norm)
        if self.scales_W is not None:
            projected_TW = ops.scaled(projected_TW, self.scales_W)
        gate_TM, xbc_TC, dt_TN = projected_TW.split_with_sizes(self.sizes, dim=-1)
        conv_state, state = cache.states
        xbc_TC = ops.causal_conv(xbc_TC, self.conv_WC, self.bias_C, conv_state, rows.states, "silu")
        out_TM = ops.state_space(xbc_TC, dt_TN, self.heads, state, rows.states)
        if self.gated_norm is None:
            return ops.silu_and_mul(ops.concat(gate_TM, out_TM))
        return self.gated_norm(out_TM, gate_TM)
