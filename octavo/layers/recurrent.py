"""Layers with a recurrent state in place of keys and values, without the projection of their outputs.

Shapes: T tokens, D model, C channels (of the convolution), W its width, N heads (of values), K numbers of a key or of a
channel's state, V of a value, P of a head.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from octavo import ops
from octavo.layers.linear import Linear, RowParallelLinear
from octavo.layers.norm import RMSNorm
from octavo.ops.attention.attention import LayerCache, PagedRows
from octavo.ops.recurrent.gated_delta import DeltaHeads
from octavo.ops.recurrent.selective_scan import ScanChannels
from octavo.ops.recurrent.state_space import StateSpaceHeads

# ---- The gated delta rule (arXiv 2412.06464).


class GatedDelta:
    """``delta(conv(qkv(h)), dt(h), beta(h), gate(h))`` with ``h = norm(x)``: the heads' outputs, normalised and gated.

    ``projections`` are fused: a row of their result has C columns of queries, keys and values, N V of gates, N of betas
    and N of time steps. The state is that of ``ops.causal_conv`` and that of ``ops.gated_delta``.
    """

    def __init__(self, norm: RMSNorm | None, projections: Linear, conv_WC: Tensor, heads: DeltaHeads) -> None:
        self.norm = norm
        self.projections = projections
        self.conv_WC = conv_WC
        self.heads = heads
        outputs = heads.num_heads * heads.value_dim
        self.sizes = [sum(heads.sizes), outputs, heads.num_heads, heads.num_heads]

    def __call__(self, x_TD: Tensor, cache: LayerCache, rows: PagedRows) -> Tensor:
        """A new tensor [T, N V]."""
        qkv_TC, gate_TM, beta_TN, dt_TN = self.projections.columns(x_TD, self.norm, self.sizes)
        conv_state, state = cache.states
        qkv_TC = ops.causal_conv(qkv_TC, self.conv_WC, None, conv_state, rows.states, "silu")
        return ops.gated_delta(qkv_TC, dt_TN, beta_TN, gate_TM, self.heads, state, rows.states)


class KimiDelta:
    """Kimi Delta Attention (arXiv 2510.26692): a decay for each number of a key, gates by sigmoids.

    ``projections`` are fused: a row of their result has C columns of queries, keys and values, N of betas, and N K time
    steps and N V gates, or what is mapped to these by ``maps``, which have as many inputs each.
    """

    def __init__(
        self,
        norm: RMSNorm,
        projections: Linear,
        conv_WC: Tensor,
        maps: tuple[Linear, Linear] | None,
        rank: int,
        heads: DeltaHeads,
    ) -> None:
        """``maps`` are those to time steps and to gates, with ``rank`` inputs each."""
        self.norm = norm
        self.projections = projections
        self.conv_WC = conv_WC
        self.maps = maps
        self.heads = heads
        direct = heads.num_heads * heads.key_dim, heads.num_heads * heads.value_dim
        self.sizes = [sum(heads.sizes), heads.num_heads, *(direct if maps is None else (rank, rank))]

    def __call__(self, x_TD: Tensor, cache: LayerCache, rows: PagedRows) -> Tensor:
        """A new tensor [T, N V]."""
        qkv_TC, beta_TN, dt, gate_TM = self.projections.columns(x_TD, self.norm, self.sizes)
        if self.maps is not None:
            dt, gate_TM = (own(ops.concat(part)) for own, part in zip(self.maps, (dt, gate_TM), strict=True))
        conv_state, state = cache.states
        qkv_TC = ops.causal_conv(qkv_TC, self.conv_WC, None, conv_state, rows.states, "silu")
        return ops.gated_delta(qkv_TC, dt, beta_TN, gate_TM, self.heads, state, rows.states)


# ---- Mamba (arXiv 2312.00752).


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


# ---- Mamba-2 (arXiv 2405.21060).


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


# ---- The short convolution with input and output gates of LFM2 (Liquid AI, 2025).


class ShortConv:
    """``c * conv(b * x)``, where ``b, c, x`` are the columns of ``projections(norm(x))``."""

    def __init__(self, norm: RMSNorm, projections: Linear, conv_WD: Tensor, bias_D: Tensor | None) -> None:
        self.norm = norm
        self.projections = projections
        self.conv_WD = conv_WD
        self.bias_D = bias_D

    def __call__(self, x_TD: Tensor, cache: LayerCache, rows: PagedRows) -> Tensor:
        """A new tensor of x's shape, or with this rank's columns."""
        bcx_T3D = self.projections(x_TD, norm=self.norm)
        (state,) = cache.states
        return ops.gated_conv(bcx_T3D, self.conv_WD, self.bias_D, state, rows.states)
