"""A layer of a decoder, built from its parts (``parts.py``).

Shapes: T tokens of the step, R rows whose logits are needed, D model, N heads, K kv heads, H head dim, X experts,
F the width of an expert.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from octavo import ops
from octavo.layers.attention import MaskedRankRows, RankRows
from octavo.layers.attention_inputs import (
    ClippedHeads,
    JointNorms,
    LateNorms,
    OwnNorms,
    Preparation,
    ScaledQueries,
    StepAngles,
    WideValues,
    gated,
)
from octavo.layers.image_attention import attention_with_images
from octavo.layers.linear import Linear
from octavo.layers.mlp import MLP
from octavo.layers.moe import ExpertRouter, MoE, SharedExpert
from octavo.layers.norm import Norm, RMSNorm
from octavo.layers.output_mlp import output_mlp
from octavo.models.loader import ExpertShape, WeightLoader
from octavo.models.parts import AttentionPart, DecoderConfig, ExpertsPart, HeadNorm
from octavo.models.rope_keys import half_split_rows
from octavo.ops.attention.attention import HeadLayout, LayerCache, PagedRows
from octavo.ops.moe import CappedSwish, ClampedSwish
from octavo.quant.stored.stored_weight import Order

FeedForward = Callable[[Tensor], Tensor]
"""Maps the residual stream [T, D], which it may overwrite, to the next one."""


def no_feed_forward(x_TD: Tensor) -> Tensor:
    """The residual stream as it is, in layers without a feed-forward part."""
    return x_TD


class DecoderLayer:
    """Attention and a feed-forward layer, one after the other or both of the same input."""

    def __init__(self, config: DecoderConfig, weights: WeightLoader, prefix: str, index: int) -> None:
        self.part, self.is_parallel = config.layers[index].attention, config.is_parallel
        self.before_attention = self.stream_norm(config, weights, prefix, config.names.before_attention)
        with weights.attention():
            self.load_mixer(config, weights, prefix, index)
        self.after_attention = self.stream_norm(config, weights, prefix, config.names.after_attention)
        self.mlp = self.feed_forward(config, weights, prefix, index)

    @property
    def input_norm(self) -> RMSNorm:
        """The norm before attention, of a family that has one."""
        assert isinstance(self.before_attention, RMSNorm)
        return self.before_attention

    def stream_norm(self, config: DecoderConfig, weights: WeightLoader, prefix: str, name: str | None) -> Norm | None:
        """A norm of the residual stream, or of what is added to it, if it has one of this name."""
        if name is None:
            return None
        is_of_added = name in (config.names.after_attention, config.names.after_mlp)
        eps = config.norm_eps if is_of_added else config.stream_eps
        return weights.stream_norm(f"{prefix}.{name}", config.hidden_size, eps, config.norm)

    # Attention.

    def load_mixer(self, config: DecoderConfig, weights: WeightLoader, prefix: str, index: int) -> None:
        """Load what ``mix`` needs, and the projection ``o_proj`` of its outputs."""
        part = self.part
        self.heads = self.head_layout(config, weights, prefix, part)
        self.qkv_proj = self.qkv(config, weights, prefix)
        name, width = f"{prefix}.{config.names.output}", part.num_heads * (part.value_dim or part.head_dim)
        is_transposed = config.is_transposed
        self.o_proj = weights.row(name, config.hidden_size, width, part.has_output_bias, is_transposed=is_transposed)
        self.heads = weights.own_heads(self.heads)
        self.num_gates = weights.num_own(part.num_heads) * part.gate_rows // part.num_heads
        self.preparations, self.wide_values = self.prepare(config, weights, prefix)

    def head_layout(self, config: DecoderConfig, weights: WeightLoader, prefix: str, part: AttentionPart) -> HeadLayout:
        """The settings of the attention, before heads are divided among devices."""
        layout = HeadLayout(
            part.num_heads,
            part.num_kv_heads,
            part.head_dim,
            part.scale,
            window=part.window,
            softcap=part.softcap,
            shares_cache=part.shared_with is not None,
        )
        if part.has_sinks:
            layout = layout._replace(sinks_N=weights.exact(f"{prefix}.{config.names.sinks}", part.num_heads))
        if part.slopes:
            slopes_N = torch.tensor(part.slopes, dtype=torch.float32, device=weights.form.device)
            layout = layout._replace(slopes_N=slopes_N)
        norm = part.head_norm
        if norm is None or norm.over != "head" or norm.is_after_rope:
            return layout
        queries, keys = self.head_weights(config, weights, prefix, norm)
        return layout._replace(q_norm_H=queries, k_norm_H=keys, norm_eps=config.norm_eps)

    def head_weights(self, config: DecoderConfig, weights: WeightLoader, prefix: str, norm: HeadNorm) -> list[Tensor]:
        """The weights [H] of a norm of each query head and each key head."""
        H = self.part.head_dim
        if not norm.has_weight:
            return [torch.ones(H, dtype=weights.form.dtype, device=weights.form.device)] * 2
        return [weights.norm_weight(f"{prefix}.{name}.weight", H, norm.offset) for name in config.names.head_norms]

    def qkv(self, config: DecoderConfig, weights: WeightLoader, prefix: str) -> Linear:
        """Queries, keys and values side by side."""
        part = self.part
        orders: tuple[Order | None, ...] = (None, None, None)
        if part.is_adjacent and part.rope is not None:
            width = config.ropes[part.rope][1]
            queries, keys = (half_split_rows(n, part.head_dim, width) for n in (part.num_heads, part.num_kv_heads))
            orders = queries, keys, None
            if len(config.names.queries) == 1:
                values = np.arange(part.num_kv_heads * (part.value_dim or part.head_dim))
                whole = (queries, len(queries) + keys, len(queries) + len(keys) + values)
                orders = np.concatenate(whole), None, None
        names = [f"{prefix}.{name}" for name in config.names.queries]
        return weights.qkv(
            *(names, self.heads, config.hidden_size, part.has_bias),
            orders=orders,
            value_dim=part.value_dim,
            is_transposed=config.is_transposed,
            gate=None
            if part.gate is None or part.gate.name is None
            else (f"{prefix}.{part.gate.name}", part.gate_rows),
        )

    def prepare(
        self, config: DecoderConfig, weights: WeightLoader, prefix: str
    ) -> tuple[list[Preparation], WideValues | None]:
        """What is done to queries, keys and values before attention, with this device's heads."""
        part, norm, found = self.part, self.part.head_norm, list[Preparation]()
        names = [f"{prefix}.{name}" for name in config.names.head_norms]
        counts = part.num_heads, part.num_kv_heads
        if norm is not None and norm.over == "all":
            pairs = zip(names, counts, strict=True)
            q_norm, k_norm = (weights.head_norm(name, count, part.head_dim, config.norm_eps) for name, count in pairs)
            found.append(JointNorms(q_norm, k_norm, self.heads))
        if norm is not None and norm.over == "each":
            pairs = zip(names, counts, strict=True)
            queries, keys = (self.own_weights(config, weights, name, count) for name, count in pairs)
            found.append(OwnNorms(queries, keys, config.norm_eps, self.heads))
        if norm is not None and norm.over == "head" and norm.is_after_rope:
            queries, keys = self.head_weights(config, weights, prefix, norm)
            eps = config.norm_eps
            found.append(LateNorms(RMSNorm(queries, eps), RMSNorm(keys, eps), self.heads))
        if part.clip:
            found.append(ClippedHeads(part.clip))
        if part.scales_queries:
            found.append(ScaledQueries(self.heads))
        wide = None
        if part.value_dim:
            wide = WideValues(self.heads, part.value_dim, part.value_scale)
            found.insert(0, wide)
        return found, wide

    def own_weights(self, config: DecoderConfig, weights: WeightLoader, name: str, count: int) -> Tensor:
        """Weights [N, H] of norms of each head, in the order of the rows of queries and keys."""
        part = self.part
        weight_NH = weights.matrix(name, count, part.head_dim, num_heads=count)
        if part.is_adjacent and part.rope is not None:
            order = half_split_rows(1, part.head_dim, config.ropes[part.rope][1])
            weight_NH = weight_NH[:, torch.from_numpy(order).to(weight_NH.device)]
        return weight_NH

    # The feed-forward layer.

    def feed_forward(self, config: DecoderConfig, weights: WeightLoader, prefix: str, index: int) -> FeedForward:
        """The feed-forward part with its norms."""
        part, names, D = config.layers[index].mlp, config.names, config.hidden_size
        if names.before_mlp is not None and names.before_mlp == names.before_attention:
            before = self.before_attention
        else:
            before = self.stream_norm(config, weights, prefix, names.before_mlp)
        if isinstance(part, ExpertsPart):
            return self.mixture(config, part, weights, prefix, before)
        after = self.stream_norm(config, weights, prefix, names.after_mlp)
        ups = [f"{prefix}.{name}" for name in names.ups]
        if isinstance(part.activation, str | ClampedSwish | CappedSwish):
            up = weights.gate_up(ups, part.size, D, part.has_bias)
        else:
            up = weights.column(ups[0], part.size, D, part.has_bias, is_transposed=config.is_transposed)
        down = weights.row(f"{prefix}.{names.down}", D, part.size, part.has_bias, is_transposed=config.is_transposed)
        return MLP(before, up, down, part.activation, after)

    def mixture(
        self, config: DecoderConfig, part: ExpertsPart, weights: WeightLoader, prefix: str, before: Norm | None
    ) -> FeedForward:
        """The feed-forward part of a layer with experts."""
        moe, D, X, F = part.moe, config.hidden_size, part.moe.num_experts, part.moe.expert_size
        routing = part.routing
        if part.correction is not None:
            name = f"{prefix}.{part.correction}"
            sizes = (1, X) if weights.tensors.shape(name) == (1, X) else (X,)
            correction = weights.exact(name, *sizes)
            routing = routing._replace(correction_X=correction.view(X))
        router = ExpertRouter(before, weights.router(f"{prefix}.{part.router}", X, D), routing)
        gate, up, down = part.projections
        shape = ExpertShape(X, D, F, moe.activation, gate, up, down)
        experts_name, order = f"{prefix}.{part.experts}", np.arange(2 * F)
        if part.stacked is not None and part.stacked[0].endswith(".weight"):  # of a linear layer: [outputs, inputs]
            experts = weights.stacked_experts(experts_name, shape, order, names=part.stacked, is_transposed=False)
        elif part.stacked is not None and weights.tensors.has(f"{experts_name}.{part.stacked[0]}"):
            experts = weights.stacked_experts(experts_name, shape, order, names=part.stacked)
        else:
            experts = weights.experts(experts_name, shape)
        shared = self.shared_expert(config, part, weights, prefix) if moe.shared_size else None
        after = self.stream_norm(config, weights, prefix, config.names.after_mlp)
        return MoE(router, experts, shared, weights.collective, after)

    def shared_expert(
        self, config: DecoderConfig, part: ExpertsPart, weights: WeightLoader, prefix: str
    ) -> SharedExpert:
        """The expert that all tokens use."""
        D, F, has_bias = config.hidden_size, part.moe.shared_size, part.shared_has_bias
        activation = part.shared_activation or part.moe.activation
        return SharedExpert(
            weights.gate_up([f"{prefix}.{name}" for name in part.shared], F, D, has_bias),
            weights.partial_row(f"{prefix}.{part.shared_down}", D, F, has_bias),
            activation,
            None if part.shared_gate is None else weights.replicated(f"{prefix}.{part.shared_gate}", 1, D),
            part.shared_scale,
        )

    # The computation.

    def __call__(self, x_TD: Tensor, step: StepAngles, cache: LayerCache, rows: PagedRows) -> Tensor:
        """The next residual stream, [T, D], or [R, D] with logits indices; ``x`` may be overwritten."""
        if isinstance(rows, (RankRows, MaskedRankRows)):
            return self._of_ranks(x_TD, step, cache, rows)
        mixed_TN, x_TD = rows.pick(self.mix(x_TD, step, cache, rows), x_TD)
        if self.is_parallel:
            return self.o_proj(mixed_TN, residual=self.mlp(x_TD))
        if self.after_attention is None:
            return output_mlp(self.o_proj, self.mlp, mixed_TN, x_TD)
        return self.mlp(self.after_attention(self.o_proj(mixed_TN), x_TD))

    def _of_ranks(self, x_TD: Tensor, step: StepAngles, cache: LayerCache, rows: RankRows | MaskedRankRows) -> Tensor:
        """``__call__`` where each rank computes attention for its own rows; ``step`` is that of these."""
        part_RD = rows.part(x_TD, lambda x_nD, own: self.mix(x_nD, step, cache, own), self.o_proj)
        _, x_RD = rows.pick(x_TD, x_TD)
        if self.is_parallel:
            return rows.collective.all_reduce(part_RD, self.mlp(x_RD))
        if self.after_attention is None:
            return self.mlp(rows.collective.all_reduce(part_RD, x_RD))
        return self.mlp(self.after_attention(rows.collective.all_reduce(part_RD), x_RD))

    def mix(self, x_TD: Tensor, step: StepAngles, cache: LayerCache, rows: PagedRows) -> Tensor:
        """What attention, or what a layer has in its place, makes of the residual stream, [T, N H]."""
        return self.attend(self.qkv_proj.of_normed(x_TD, self.before_attention), step, cache, rows)

    def attend(self, qkv_TW: Tensor, step: StepAngles, cache: LayerCache, rows: PagedRows) -> Tensor:
        """Attention of projected queries, keys and values, behind gates if there are any, [T, N H]."""
        gates_TG, qkv_TW = qkv_TW.tensor_split([self.num_gates], dim=-1)
        if self.num_gates:
            qkv_TW = ops.concat(qkv_TW)
        angles = step.of(self.part.rope)
        for prepare in self.preparations:
            qkv_TW, angles = prepare(qkv_TW, angles, step)
        attended_TN = attention_with_images(qkv_TW, self.heads, angles, cache, rows)
        if self.wide_values is not None:
            attended_TN = self.wide_values.narrow(attended_TN)
        return attended_TN if self.part.gate is None else gated(gates_TG, attended_TN, self.part.gate.function)
