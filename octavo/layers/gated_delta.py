"""Layers with the gated delta rule (arXiv 2412.06464): a recurrent state in place of keys and values.

Shapes: T tokens, D model, C channels of the convolution, W its width, N value heads, V numbers of a value.
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
