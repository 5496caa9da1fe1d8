"""Inkling (Thinking Machines, 2026): attention by learned biases of distances instead of rotated positions, and short
convolutions of keys, of values, and of what each part of a layer adds.

A map of the token mixes some profiles of biases over distances. Layers with windows have heads of their own number and
width. Beside the chosen experts each token uses some that all tokens use, with shares of the same sum.

Shapes: T tokens of the step, D model, N heads, K kv heads, H head dim, P profiles, E distances with a bias, C channels,
S experts that a token uses, X experts among which it chooses.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from octavo import ops
from octavo.layers.attention import attention
from octavo.layers.attention_inputs import StepAngles
from octavo.layers.experts import Mixture
from octavo.layers.linear import Linear, RowParallelLinear
from octavo.layers.moe import ExpertRouter
from octavo.models.config_keys import ConfigKeys, wrong
from octavo.models.decoder import Decoder, read_decoder
from octavo.models.decoder_layer import DecoderLayer, no_feed_forward
from octavo.models.layer_cache import LayerCacheSpec, conv_state
from octavo.models.linear_parts import MatrixRows
from octavo.models.loader import ExpertShape, WeightLoader
from octavo.models.model_config import ACTIVATIONS, FULL, SLIDING
from octavo.models.moe_config import MoESettings, read_dense_first, read_experts
from octavo.models.parts import DecoderConfig
from octavo.ops.attention.attention import LayerCache, PagedRows
from octavo.ops.moe import Routing
from octavo.quant.stored.shard import Section

KINDS = {"hybrid": FULL, "hybrid_sliding": SLIDING}
ALWAYS = 1e4
"""Added to the scores of experts that all tokens use, for the selection."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DistanceConfig(DecoderConfig):
    """With attention by biases of distances, and short convolutions."""

    slides: tuple[bool, ...]
    """Whether each layer has a window, which a short context may not need."""
    width: int
    """Of the convolutions."""
    num_profiles: int
    extents: tuple[int, ...]
    """Distances that have a bias in each layer."""
    growth: tuple[float, float] | None
    """Scores of layers without a window grow as ``1 + factor * ln(max(1, (position + 1) / from))``."""
    num_known: int
    """Tokens that the map to logits knows; those behind them fill it up."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class InklingConfig(DistanceConfig):
    moe: MoESettings
    num_shared: int
    """Experts that all tokens use."""
    route_scale: float

    @property
    def mixtures(self) -> tuple[MoESettings, ...]:
        return (self.moe,) if any(self.moe.is_sparse) else ()

    @property
    def dense_sizes(self) -> set[int]:
        return set() if all(self.moe.is_sparse) else {self.moe.dense_size}


class ShortSum:
    """``x + conv(x)`` of each channel along its sequence."""

    def __init__(self, weights: WeightLoader, names: list[str], sections: list[Section], width: int) -> None:
        self.conv_WC = weights.conv(names, sections, width)

    def __call__(self, x_TC: Tensor, state: Tensor, rows: PagedRows, residual_TC: Tensor | None = None) -> Tensor:
        """A new tensor, to which a residual is added."""
        moved_TC = x_TC + ops.causal_conv(x_TC, self.conv_WC, None, state, rows.states)
        return moved_TC if residual_TC is None else moved_TC + residual_TC


class DenseMLP:
    """``scale * down(silu(gate(h)) * up(h))``"""

    def __init__(self, config: InklingConfig, weights: WeightLoader, name: str) -> None:
        D, F = config.hidden_size, config.moe.dense_size
        self.up: Linear = weights.gate_up([f"{name}.gate_proj", f"{name}.up_proj"], F, D)
        self.down: Linear | RowParallelLinear = weights.row(f"{name}.down_proj", D, F)
        self.scale_1 = weights.dense(f"{name}.global_scale", 1)
        self.activation = config.moe.activation

    def __call__(self, h_TD: Tensor) -> Tensor:
        assert isinstance(self.activation, str)
        return self.down(self.up(h_TD, activation=self.activation)) * self.scale_1


class SharingExperts:
    """The chosen experts and those that all tokens use, whose shares are sigmoids divided by their sum."""

    def __init__(self, config: InklingConfig, weights: WeightLoader, name: str) -> None:
        D, moe, count, gate = config.hidden_size, config.moe, config.num_shared, f"{name}.gate"
        X, F = moe.num_experts, moe.expert_size
        chosen_X = weights.exact(f"{gate}.e_score_correction_bias", X)
        correction_X = torch.cat((chosen_X, chosen_X.new_full((count,), ALWAYS)))
        routing = Routing(moe.num_chosen + count, True, "sigmoid", config.route_scale, correction_X=correction_X)
        self.router = ExpertRouter(None, weights.router(gate, X + count, D), routing)
        self.scale_1 = weights.dense(f"{gate}.global_scale", 1)
        order = np.arange(2 * F)
        shape = ExpertShape(X, D, F, moe.activation, num_zero=count)
        self.experts: Mixture = weights.stacked_experts(f"{name}.experts", shape, order, is_transposed=False)
        shared, names = shape._replace(num_experts=count, num_zero=1), ("gate_proj", "up_proj", "down_proj")
        form, weights.form = weights.form, dataclasses.replace(weights.form, keeps_experts_whole=False)
        self.shared: Mixture = weights.stacked_experts(  # too few for each rank to have whole ones
            f"{name}.shared_experts", shared, order, names=names, is_transposed=False
        )
        weights.form = form
        self.num_experts, self.collective = X, weights.collective

    def __call__(self, h_TD: Tensor) -> Tensor:
        _, ids_TS, shares_TS = self.router(h_TD)
        is_shared_TS = ids_TS >= self.num_experts
        y_TD = self.experts(h_TD, ids_TS.masked_fill(is_shared_TS, -1), shares_TS)
        of_shared_TS = (ids_TS - self.num_experts).clamp(min=-1)
        return self.collective.all_reduce(self.shared(h_TD, of_shared_TS, shares_TS, y_TD)) * self.scale_1


class InklingLayer(DecoderLayer):
    """All rows are computed in the last layer, too: what it adds depends on the rows before."""

    def __init__(self, config: InklingConfig, weights: WeightLoader, prefix: str, index: int) -> None:
        super().__init__(config, weights, prefix, index)
        D, width = config.hidden_size, config.width
        self.before_mlp = weights.norm(f"{prefix}.post_attention_layernorm", D, config.norm_eps)
        self.after = [
            ShortSum(weights, [f"{prefix}.{part}_sconv.conv1d"], [Section(D, 1)], width) for part in ("attn", "mlp")
        ]
        kind = SharingExperts if config.moe.is_sparse[index] else DenseMLP
        self.second: SharingExperts | DenseMLP = kind(config, weights, f"{prefix}.mlp")

    def load_mixer(self, config: DecoderConfig, weights: WeightLoader, prefix: str, index: int) -> None:
        assert isinstance(config, InklingConfig)
        part, D, name = self.part, config.hidden_size, f"{prefix}.self_attn"
        N, K, H, P = part.num_heads, part.num_kv_heads, part.head_dim, config.num_profiles
        self.heads = weights.own_heads(self.head_layout(config, weights, prefix, part))
        keys = [Section(K * H, K)] * 2
        sections = {"q": Section(N * H, N), "k": keys[0], "v": keys[1], "r": Section(N * P, N)}
        parts = [MatrixRows(f"{name}.{which}_proj", [section]) for which, section in sections.items()]
        self.projections = weights.fused(parts, D)
        own_N, own_K = self.heads.num_heads, self.heads.num_kv_heads
        self.sizes = own_N * H, 2 * own_K * H, own_N * P
        self.moved = ShortSum(weights, [f"{name}.{which}_sconv.conv1d" for which in "kv"], keys, config.width)
        self.norms = [weights.norm(f"{name}.{which}_norm", H, config.norm_eps) for which in "qk"]
        self.slides = config.slides[index]
        self.profiles_EP = weights.dense(f"{name}.rel_logits_proj.proj", P, config.extents[index]).t().contiguous()
        self.o_proj = weights.row(f"{name}.o_proj", D, N * H)

    def feed_forward(self, *_: Any) -> Any:
        return no_feed_forward  # ``second`` gives what is added

    def attended(self, h_TD: Tensor, step: StepAngles, cache: LayerCache, rows: PagedRows) -> Tensor:
        """What attention makes of normed rows, [T, N H]."""
        heads, H = self.heads, self.heads.head_dim
        q_TW, kv_TW, mix_TW = self.projections(h_TD).split_with_sizes(self.sizes, dim=1)
        k_TW, v_TW = self.moved(ops.concat(kv_TW), cache.states[0], rows).chunk(2, dim=1)
        q_norm, k_norm = self.norms
        q_TW, k_TW = q_norm(q_TW.reshape(-1, H)).view_as(q_TW), k_norm(k_TW.reshape(-1, H)).view_as(k_TW)
        if step.query_scale_T1 is not None and not self.slides:
            q_TW, mix_TW = ((x.float() * step.query_scale_T1).to(x.dtype) for x in (q_TW, mix_TW))
        bias_RE = ops.linear(mix_TW.reshape(len(h_TD) * heads.num_heads, -1), self.profiles_EP)
        bias_TNE = bias_RE.view(len(h_TD), heads.num_heads, -1)
        return attention(ops.concat(q_TW, k_TW, v_TW), heads._replace(bias_TNE=bias_TNE), None, None, cache, rows)

    def __call__(self, x_TD: Tensor, step: StepAngles, cache: LayerCache, rows: PagedRows) -> Tensor:
        first, second = self.after
        y_TD = self.o_proj(self.attended(self.input_norm(x_TD), step, cache, rows))
        x_TD = first(y_TD, cache.states[1], rows, x_TD)
        x_TD = second(self.second(self.before_mlp(x_TD)), cache.states[2], rows, x_TD)
        return rows.pick(x_TD, x_TD)[0]


class DistanceDecoder(Decoder):
    config: DistanceConfig

    def __init__(self, config: DistanceConfig, weights: WeightLoader) -> None:
        super().__init__(config, weights)
        self.input_norm = weights.norm("model.embed_tokens.embed_norm", config.hidden_size, config.norm_eps)
        self.most_V: Tensor | None = None
        if config.num_known < config.vocab_size:
            most_V = torch.full((config.vocab_size,), float("inf"), dtype=weights.form.dtype)
            most_V[config.num_known :] = torch.finfo(weights.form.dtype).min
            self.most_V = weights.own_part(config.names.head, most_V)

    def embedded(self, token_ids_T: Tensor, positions_T: Tensor) -> Tensor:
        return self.input_norm(super().embedded(token_ids_T, positions_T))

    def step(self, token_ids_T: Tensor, positions_T: Tensor, x_TD: Tensor, rows: PagedRows) -> StepAngles:
        if self.config.growth is None:
            return StepAngles(())
        factor, start = self.config.growth
        return StepAngles((), 1 + factor * ((positions_T + 1).float() / start).clamp(min=1).log().unsqueeze(1))

    def logits(self, x_RD: Tensor) -> Tensor:
        logits_RV = super().logits(x_RD)
        return logits_RV if self.most_V is None else torch.minimum(logits_RV, self.most_V)


def read_distances(
    keys: ConfigKeys, max_len: int | None, kinds: Sequence[str], window: int, growth: tuple[float, float] | None
) -> DistanceConfig:
    """What models with biases of distances have in common; scores are divided by the root of a head's width."""
    windows = tuple(KINDS[kind] for kind in kinds), window
    config = read_decoder(keys, max_len, head_dim=128, windows=windows, has_bias=False).without_rope()
    full, own = config.layers[0].attention, "swa_"
    sizes = {"num_heads": "num_attention_heads", "num_kv_heads": "num_key_value_heads", "head_dim": "head_dim"}
    given = {part: keys.size(own + key, getattr(config, part)) for part, key in sizes.items()}
    slides = [kind != "hybrid" for kind in kinds]
    heads = {part: [given[part] if local else getattr(full, part) for local in slides] for part in sizes}
    if any(n % k for n, k in zip(heads["num_heads"], heads["num_kv_heads"], strict=True)):
        raise wrong("swa_num_attention_heads", given["num_heads"], f"a multiple of {given['num_kv_heads']} kv heads")
    config = config.with_attention(**heads, has_bias_of_distance=True, scale=[H**-0.5 for H in heads["head_dim"]])
    extent, width = keys.size("rel_extent", 1024), keys.size("conv_kernel_size", 4, low=2)
    D, known = config.hidden_size, keys.size("unpadded_vocab_size", config.vocab_size)
    caches = [
        LayerCacheSpec(K, H, part.attention.window, state=_states(width, D, K, H))
        for K, H, part in zip(heads["num_kv_heads"], heads["head_dim"], config.layers, strict=True)
    ]
    return config.with_caches(caches).extended(
        DistanceConfig,
        width=width,
        num_profiles=keys.size("d_rel", 16),
        slides=tuple(slides),
        extents=tuple(window if local else extent for local in slides),
        growth=growth,
        num_known=min(known, config.vocab_size),
    )


class InklingForCausalLM(DistanceDecoder):
    layer_class: Any = InklingLayer

    @classmethod
    def read_config(cls, keys: ConfigKeys, max_len: int | None) -> InklingConfig:
        keys = keys.over({**keys.values, **other_names(keys)})
        count, window = keys.size("num_hidden_layers", 66), keys.size("sliding_window_size", 512)
        kinds = keys.choices("layer_types", tuple(KINDS), count) or _kinds(keys, count)
        keys.must_be({"shared_expert_sink": (True,), "tie_word_embeddings": (False,)})
        start, alpha = keys.get("log_scaling_n_floor"), keys.number("log_scaling_alpha", 0.1)
        growth = None if start is None else (alpha, keys.number("log_scaling_n_floor"))
        config = read_distances(keys, max_len, kinds, window, growth)
        moe = read_experts(
            keys,
            config,
            count_keys=("n_routed_experts", "num_local_experts"),
            num_chosen=6,
            normalises=True,
            expert_size=keys.size("moe_intermediate_size", 3072),
            is_sparse=read_dense_first(keys, count, keys.size("dense_mlp_idx", 0, low=0)),
            activation=keys.choice("hidden_act", ACTIVATIONS, "silu"),
        )
        keys.pass_over(*UNUSED)
        found = config.with_attention(scale=[1 / part.attention.head_dim for part in config.layers]).extended(
            InklingConfig,
            moe=moe,
            num_shared=keys.size("n_shared_experts", 2),
            route_scale=keys.number("route_scale", 8.0),
        )
        return dataclasses.replace(
            found, ffn_size=moe.widest, logit_scale=1 / keys.number("logits_mup_width_multiplier", 24.0)
        )

    def __init__(self, config: InklingConfig, weights: WeightLoader) -> None:
        super().__init__(config, weights)
        weights.tensors.leave_out("model.mtp.")


UNUSED = (
    *("number_of_conv_states", "rms_norm_eps_moe_gate", "num_mtp_layers", "chain_hidden_post_norm"),
    *("mtp_hidden_states_first", "mtp_local_layer_ids", "sliding_window_size", "local_layer_ids"),
)


def other_names(keys: ConfigKeys) -> dict[str, Any]:
    """Values under the usual keys that published files have under others."""
    found: dict[str, Any] = {}
    for key, other in (("max_position_embeddings", "model_max_length"), ("conv_kernel_size", "sconv_kernel_size")):
        if keys.get(other) is not None:
            found[key] = keys.get(other)
    if keys.get("dense_intermediate_size") is not None:
        found |= {"moe_intermediate_size": keys.get("intermediate_size")}
        found |= {"intermediate_size": keys.get("dense_intermediate_size")}
    return found


def _kinds(keys: ConfigKeys, count: int) -> tuple[str, ...]:
    local = keys.get("local_layer_ids")
    if local is None:
        local = [i for i in range(count) if (i + 1) % 6]
    if not isinstance(local, list | tuple) or not all(type(i) is int and 0 <= i < count for i in local):
        raise wrong("local_layer_ids", local, f"a list of numbers of layers, below {count}")
    return tuple("hybrid_sliding" if i in local else "hybrid" for i in range(count))


def _states(width: int, hidden_size: int, num_kv_heads: int, head_dim: int) -> tuple[Any, ...]:
    """Inputs of the convolutions: of keys and values, and of what attention and the feed-forward layer add."""
    added = conv_state(width, hidden_size, 0)
    return conv_state(width, 2 * num_kv_heads * head_dim, num_kv_heads), added, added
