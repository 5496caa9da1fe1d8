"""LFM2 (Liquid AI, 2025): gated short convolutions, and attention in every few layers; LFM2-MoE has experts.

Shapes: T tokens of the step, D model.
"""

from __future__ import annotations

import dataclasses

from torch import Tensor

from octavo.layers.mlp import GatedMLP
from octavo.layers.moe import ExpertRouter, MoE
from octavo.layers.output_mlp import output_mlp
from octavo.layers.short_conv import ShortConv
from octavo.models.config import FULL
from octavo.models.config_keys import ConfigKeys
from octavo.models.hybrid import HybridConfig, HybridForCausalLM, layer_kinds, of_llama
from octavo.models.layer_cache import LayerCacheSpec, conv_state, state_layer
from octavo.models.linear_parts import MatrixRows
from octavo.models.llama import FeedForward, LlamaConfig, LlamaLayer, read_llama
from octavo.models.loader import ExpertShape, WeightLoader
from octavo.models.moe import MoESettings, read_experts
from octavo.ops.attention import HeadLayout, LayerCache, PagedRows
from octavo.ops.moe import Routing
from octavo.quant.stored.shard import Section

CONV = "conv"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lfm2Config(HybridConfig):
    width: int
    """Of the convolutions."""
    conv_bias: bool
    has_expert_bias: bool = False
    """Whether a bias is added to the scores of experts for their selection."""
    share_scale: float = 1.0


def read_lfm2(keys: ConfigKeys, max_len: int | None) -> Lfm2Config:
    """Read the configuration, without experts."""
    num_layers = keys.size("num_hidden_layers")
    tied = keys.flag("tie_embedding", True)
    plain = read_llama(
        keys,
        max_len,
        tied=tied,
        eps=keys.number("norm_eps", 1e-5),
        windows=((FULL,) * num_layers, None),
        ffn_size=keys.get("block_ff_dim"),
    )
    attends = keys.get("full_attn_idxs")
    kinds = keys.choices("layer_types", (CONV, FULL), num_layers)
    if kinds is None and isinstance(attends, list | tuple):
        kinds = tuple(FULL if i in attends else CONV for i in range(num_layers))
    kinds = kinds or layer_kinds(keys, "layer_types", (CONV, FULL), num_layers)
    D, width = plain.hidden_size, keys.size("conv_L_cache", 3, low=2)
    of_conv, of_attention = state_layer(conv_state(width, D, D)), LayerCacheSpec(plain.num_kv_heads, plain.head_dim)
    return Lfm2Config(
        **of_llama(plain),
        kinds=kinds,
        caches=tuple(of_conv if kind == CONV else of_attention for kind in kinds),
        width=width,
        conv_bias=keys.flag("conv_bias"),
    )


def _ffn_size(keys: ConfigKeys, stored: int) -> int:
    """The width of feed-forward layers: two thirds of the one that is stored, unless it is not to be adjusted."""
    multiplier, multiple = keys.get("block_ffn_dim_multiplier", 1.0), keys.size("block_multiple_of", 256)
    if not keys.flag("block_auto_adjust_ff_dim", True):
        return stored
    width = int(multiplier * int(2 * stored / 3))
    return -(-width // multiple) * multiple


class Lfm2Layer(LlamaLayer):
    def __init__(self, config: Lfm2Config, weights: WeightLoader, prefix: str, index: int) -> None:
        D, eps = config.hidden_size, config.norm_eps
        self.input_norm = weights.norm(f"{prefix}.operator_norm", D, eps)
        self.conv: ShortConv | None = None
        if config.kinds[index] == CONV:
            name, has_bias, channels = f"{prefix}.conv", config.conv_bias, Section(D, D)
            projections = weights.fused([MatrixRows(f"{name}.in_proj", [channels] * 3)], D, has_bias)
            bias = weights.exact_part(f"{name}.conv.bias", channels) if has_bias else None
            conv_WD = weights.conv(f"{name}.conv", [channels], config.width)
            self.conv = ShortConv(self.input_norm, projections, conv_WD, bias)
            self.o_proj = weights.row(f"{name}.out_proj", D, D, has_bias)
        else:
            name = f"{prefix}.self_attn"
            self.heads = self.head_layout(config, weights, name, index)
            self.qkv_proj = self.qkv(config, weights, name)
            self.o_proj = weights.row(f"{name}.out_proj", D, self.heads.sizes[0])
            self.heads = weights.own_heads(self.heads)
        self.mlp = self.feed_forward(config, weights, prefix, index)

    def head_layout(self, config: LlamaConfig, weights: WeightLoader, prefix: str, index: int) -> HeadLayout:
        names = (f"{prefix}.{part}_layernorm.weight" for part in "qk")
        q_norm, k_norm = (weights.dense(name, config.head_dim) for name in names)
        plain = super().head_layout(config, weights, prefix, index)
        return plain._replace(q_norm_H=q_norm, k_norm_H=k_norm, norm_eps=config.norm_eps)

    def feed_forward(self, config: LlamaConfig, weights: WeightLoader, prefix: str, index: int) -> FeedForward:
        if config.moe is not None and config.moe.is_sparse[index]:
            return self.mixture(config, config.moe, weights, prefix)
        D, F, name = config.hidden_size, config.dense_size, f"{prefix}.feed_forward"
        return GatedMLP(
            weights.norm(f"{prefix}.ffn_norm", D, config.norm_eps),
            weights.gate_up([f"{name}.w1", f"{name}.w3"], F, D),
            weights.row(f"{name}.w2", D, F),
        )

    def mixture(self, config: LlamaConfig, moe: MoESettings, weights: WeightLoader, prefix: str) -> FeedForward:
        assert isinstance(config, Lfm2Config)
        D, X, name = config.hidden_size, moe.num_experts, f"{prefix}.feed_forward"
        bias = weights.exact(f"{name}.expert_bias", X) if config.has_expert_bias else None
        routing = Routing(moe.num_chosen, moe.normalises, "sigmoid", config.share_scale, correction_X=bias)
        norm = weights.norm(f"{prefix}.ffn_norm", D, config.norm_eps)
        experts = weights.experts(
            f"{name}.experts", ExpertShape(X, D, moe.expert_size, moe.activation, "w1", "w3", "w2")
        )
        return MoE(ExpertRouter(norm, weights.router(f"{name}.gate", X, D), routing), experts, None, weights.collective)

    def __call__(self, x_TD: Tensor, angles: tuple[Tensor, Tensor], cache: LayerCache, rows: PagedRows) -> Tensor:
        if self.conv is None:
            return super().__call__(x_TD, angles, cache, rows)
        mixed_TD, x_TD = rows.pick(self.conv(x_TD, cache, rows), x_TD)
        return output_mlp(self.o_proj, self.mlp, mixed_TD, x_TD)


class Lfm2ForCausalLM(HybridForCausalLM):
    layer_class = Lfm2Layer
    names = ("model.embed_tokens", "model.layers", "model.embedding_norm", "lm_head")

    @classmethod
    def read_config(cls, keys: ConfigKeys, max_len: int | None) -> Lfm2Config:
        config = read_lfm2(keys, max_len)
        return dataclasses.replace(config, ffn_size=_ffn_size(keys, config.ffn_size))


class Lfm2MoeForCausalLM(Lfm2ForCausalLM):
    @classmethod
    def read_config(cls, keys: ConfigKeys, max_len: int | None) -> Lfm2Config:
        config = read_lfm2(keys, max_len)
        dense = keys.size("num_dense_layers", 2, low=0)
        moe = read_experts(
            keys,
            config.num_layers,
            config.ffn_size,
            config.activation,
            count_keys=("num_experts",),
            num_chosen=4,
            expert_size=keys.size("moe_intermediate_size", 1792),
            normalises=keys.flag("norm_topk_prob", True),
            is_sparse=tuple(i >= dense for i in range(config.num_layers)),
        )
        has_bias, scale = keys.flag("use_expert_bias", True), keys.number("routed_scaling_factor", 1.0)
        return dataclasses.replace(config, moe=moe, ffn_size=moe.widest, has_expert_bias=has_bias, share_scale=scale)
