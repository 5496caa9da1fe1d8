"""Layers of Mamba (arXiv 2312.00752).

Shapes: T tokens, D model, C channels, K state size.
"""

from __future__ import annotations

from torch import Tensor

from octavo import ops
from octavo.layers.linear import Linear
from octavo.layers.norm import RMSNorm
from octavo.layers.row_parallel import RowParallelLinear
from octavo.ops.attention import LayerCache, PagedRows
from octavo.ops.selective_scan import ScanChannels


class Mamba:
    """``scan(y, widen(dt), b, c) * silu(z)`` with ``y = conv(x)``: ``x, z`` are the columns of ``projections``, and
    ``dt, b, c`` those of ``parts`` of y, each through its norm if there are ``part_norms``."""

    def __init__(
        self,
        norm: RMSNorm,
        projections: Linear,
        conv: tuple[Tensor, Tensor | None],
        parts: Linear | RowParallelLinear,
        widen: Linear,
        channels: ScanChannels,
        part_norms: tuple[RMSNorm, ...],
    ) -> None:
        self.norm = norm
        self.projections = projections
        self.conv_WC, self.bias_C = conv
        self.parts = parts
        self.widen = widen
        self.channels = channels
        self.part_norms = part_norms
        self.state_size = len(channels.a_log_KC)

    def __call__(self, x_TD: Tensor, cache: LayerCache, rows: PagedRows) -> Tensor:
        """A new tensor [T, C]."""
        x_TC, gate_TC = self.projections(x_TD, norm=self.norm).chunk(2, dim=-1)
        conv_state, state = cache.states
        x_TC = ops.causal_conv(x_TC, self.conv_WC, self.bias_C, conv_state, rows.states, "silu")
        parts_TW = self.parts(x_TC)
        rank = parts_TW.shape[-1] - 2 * self.state_size
        parts = parts_TW.split_with_sizes([rank, self.state_size, self.state_size], dim=-1)
        if self.part_norms:
            parts = tuple(norm(_together(part)) for norm, part in zip(self.part_norms, parts, strict=True))
        dt_TR, b_TK, c_TK = parts
        dt_TC = self.widen(_together(dt_TR))
        out_TC = ops.selective_scan(x_TC, dt_TC, b_TK, c_TK, self.channels, state, rows.states)
        return ops.silu_and_mul(ops.concat(gate_TC, out_TC))


def _together(x: Tensor) -> Tensor:
    """x with its rows side by side in memory, in a call that can be recorded."""
    return x if x.is_contiguous() else ops.concat(x)
