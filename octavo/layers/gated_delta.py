"""Layers with the gated delta rule (arXiv 2412.06464): a recurrent state in place of keys and values.

Shapes: T tokens, D model, C channels of the convolution, W its width, N value heads, K numbers of a key, V of a value.
"""

from __future__ import annotations

from torch import Tensor

from octavo import ops
from octavo.layers.linear import Linear
from octavo.layers.norm import RMSNorm
from octavo.ops.attention import LayerCache, PagedRows
from octavo.ops.gated_delta import DeltaHeads


class GatedDelta:
    """``delta(conv(qkv(h)), dt(h), beta(h), gate(h))`` with ``h = norm(x)``: the heads' outputs, normalised and gated.

    ``projections`` are fused: a row of their result has C columns of queries, keys and values, N V of gates, N of betas
    and N of time steps. The state is that of ``ops.causal_conv`` and that of ``ops.gated_delta``.
    """

    def __init__(self, norm: RMSNorm, projections: Linear, conv_WC: Tensor, heads: DeltaHeads) -> None:
        self.norm = norm
        self.projections = projections
        self.conv_WC = conv_WC
        self.heads = heads
        outputs = heads.num_heads * heads.value_dim
        self.sizes = [sum(heads.sizes), outputs, heads.num_heads, heads.num_heads]

    def __call__(self, x_TD: Tensor, cache: LayerCache, rows: PagedRows) -> Tensor:
        """A new tensor [T, N V]."""
        parts = self.projections(x_TD, norm=self.norm).split_with_sizes(self.sizes, dim=-1)
        qkv_TC, gate_TM, beta_TN, dt_TN = parts
        conv_state, state = cache.states
        qkv_TC = ops.causal_conv(qkv_TC, self.conv_WC, None, conv_state, rows.states, "silu")
        return ops.gated_delta(qkv_TC, dt_TN, beta_TN, gate_TM, self.heads, state, rows.states)


class KimiDelta:
    """Kimi Delta Attention (arXiv 2510.26692): a decay for each number of a key, gates by sigmoids.

    ``projections`` are fused: a row of their result has C columns of queries, keys and values, N of betas, and what is
    mapped to N K time steps by ``decays`` and to N V gates by ``gates``, which have as many inputs each.
    """

    def __init__(
        self,
        norm: RMSNorm,
        projections: Linear,
        conv_WC: Tensor,
        maps: tuple[Linear, Linear],
        rank: int,
        heads: DeltaHeads,
    ) -> None:
        """``maps`` are those to time steps and to gates, with ``rank`` inputs each."""
        self.norm = norm
        self.projections = projections
        self.conv_WC = conv_WC
        self.decays, self.gates = maps
        self.heads = heads
        self.sizes = [sum(heads.sizes), heads.num_heads, rank, rank]

    def __call__(self, x_TD: Tensor, cache: LayerCache, rows: PagedRows) -> Tensor:
        """A new tensor [T, N V]."""
        parts = self.projections(x_TD, norm=self.norm).split_with_sizes(self.sizes, dim=-1)
        qkv_TC, beta_TN, of_decays, of_gates = parts
        dt, gate_TM = self.decays(ops.concat(of_decays)), self.gates(ops.concat(of_gates))
        conv_state, state = cache.states
        qkv_TC = ops.causal_conv(qkv_TC, self.conv_WC, None, conv_state, rows.states, "silu")
        return ops.gated_delta(qkv_TC, dt, beta_TN, gate_TM, self.heads, state, rows.states)
