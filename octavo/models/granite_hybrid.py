"""Granite 4 (IBM, 2025) with layers of Mamba-2, with experts or without; and Bamba (IBM, 2025), without factors.

Shapes: T tokens of the step, D model.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from torch import Tensor

from octavo.layers.attention import attention
from octavo.layers.mlp import GatedMLP
from octavo.layers.moe import ExpertRouter, MoE, SharedExpert
from octavo.models.config import FULL
from octavo.models.config_keys import ConfigKeys, wrong
from octavo.models.hybrid import (
    LINEAR,
    HybridConfig,
    HybridForCausalLM,
    MambaSizes,
    layer_kinds,
    load_mamba2,
    of_llama,
    read_bamba_sizes,
)
from octavo.models.layer_cache import LayerCacheSpec
from octavo.models.llama import FeedForward, LlamaConfig, LlamaLayer, read_llama
from octavo.models.loader import ExpertShape, WeightLoader
from octavo.models.moe import MoESettings, read_experts
from octavo.ops.attention import HeadLayout, LayerCache, PagedRows
from octavo.ops.moe import Routing

OLD_NAMES = {"mamba": LINEAR, "attention": FULL}
STACKED = ("input_linear.weight", "output_linear.weight")


@dataclasses.dataclass(frozen=True, kw_only=True)
class GraniteHybridConfig(HybridConfig):
    mamba: MambaSizes
    mamba_eps: float
    """Of the norms within Mamba-2."""
    attention_scale: float


class GraniteHybridLayer(LlamaLayer):
    """Mamba-2 or attention, then the feed-forward layer."""

    mlp_names: tuple[tuple[str, ...], str] = ("shared_mlp.input_linear",), "shared_mlp.output_linear"
    norm_name = "post_attention_layernorm"

    def __init__(self, config: GraniteHybridConfig, weights: WeightLoader, prefix: str, index: int) -> None:
        self.is_recurrent = config.kinds[index] == LINEAR
        if not self.is_recurrent:
            super().__init__(config, weights, prefix, index)
            return
        D, name = config.hidden_size, f"{prefix}.mamba"
        norm = weights.norm(f"{prefix}.input_layernorm", D, config.norm_eps)
        self.mamba = load_mamba2(weights, name, config.mamba, D, norm, config.mamba_eps)
        self.o_proj = weights.row(f"{name}.out_proj", D, config.mamba.inner, config.mamba.has_bias)
        self.mlp = self.feed_forward(config, weights, prefix, index)

    def head_layout(self, config: LlamaConfig, weights: WeightLoader, prefix: str, index: int) -> HeadLayout:
        assert isinstance(config, GraniteHybridConfig)
        return super().head_layout(config, weights, prefix, index)._replace(scale=config.attention_scale)

    def feed_forward(self, config: LlamaConfig, weights: WeightLoader, prefix: str, index: int) -> FeedForward:
        if config.moe is not None:
            return self.mixture(config, config.moe, weights, prefix)
        D, F, (_, down) = config.hidden_size, config.dense_size, self.mlp_names
        return GatedMLP(
            weights.norm(f"{prefix}.{self.norm_name}", D, config.norm_eps),
            weights.gate_up(self.gate_ups(weights, prefix), F, D, config.mlp_bias),
            weights.row(f"{prefix}.{down}", D, F, config.mlp_bias),
            config.activation,
        )

    def gate_ups(self, weights: WeightLoader, prefix: str) -> list[str]:
        """The projection to gates and ups, or those that GGUF files have instead."""
        names = [f"{prefix}.{name}" for name in self.mlp_names[0]]
        apart = [f"{prefix}.shared_mlp.{part}_proj" for part in ("gate", "up")]
        return apart if weights.tensors.has_module(apart[0]) else names

    def mixture(self, config: LlamaConfig, moe: MoESettings, weights: WeightLoader, prefix: str) -> FeedForward:
        D, X, name, down = config.hidden_size, moe.num_experts, f"{prefix}.block_sparse_moe", self.mlp_names[1]
        norm = weights.norm(f"{prefix}.{self.norm_name}", D, config.norm_eps)
        router = ExpertRouter(
            norm, weights.router(f"{name}.router.layer", X, D), Routing(moe.num_chosen, normalises=True)
        )
        shape, order = ExpertShape(X, D, moe.expert_size, moe.activation), np.arange(2 * moe.expert_size)
        if weights.tensors.has_module(f"{name}.experts"):
            experts = weights.experts(f"{name}.experts", shape)
        else:
            experts = weights.stacked_experts(name, shape, order, names=STACKED, is_transposed=False)
        shared = SharedExpert(
            weights.gate_up(self.gate_ups(weights, prefix), moe.shared_size, D),
            weights.partial_row(f"{prefix}.{down}", D, moe.shared_size),
            config.activation,
        )
        return MoE(router, experts, shared, weights.collective)

    def __call__(self, x_TD: Tensor, angles: Any, cache: LayerCache, rows: PagedRows) -> Tensor:
        if self.is_recurrent:
            mixed = self.mamba(x_TD, cache, rows)
        else:
            cos, sin = angles
            mixed = attention(self.qkv_proj(x_TD, norm=self.input_norm), self.heads, cos, sin, cache, rows)
        mixed, x_TD = rows.pick(mixed, x_TD)
        return self.mlp(self.o_proj(mixed, residual=x_TD))


class GraniteMoeHybridForCausalLM(HybridForCausalLM):
    layer_class = GraniteHybridLayer

    @classmethod
    def read_config(cls, keys: ConfigKeys, max_len: int | None) -> GraniteHybridConfig:
        num_layers, size = keys.size("num_hidden_layers"), keys.size("shared_intermediate_size", 1024)
        plain = read_llama(keys, max_len, windows=((FULL,) * num_layers, None), ffn_size=size)
        listed = keys.get("layer_types") or keys.get("layers_block_type") or ["linear_attention"] * num_layers
        kinds = [OLD_NAMES.get(str(kind), kind) for kind in listed]
        moe, num_experts = None, keys.get("num_local_experts", 8)
        if num_experts:
            moe = read_experts(
                keys,
                num_layers,
                plain.ffn_size,
                plain.activation,
                count_keys=("num_local_experts",),
                num_chosen=2,
                expert_size=plain.ffn_size,
                normalises=True,
                shared_size=size,
            )
        keys.get("num_experts_per_tok")
        positions = keys.get("position_embedding_type")
        if positions not in (None, "rope", "nope"):
            raise wrong("position_embedding_type", positions, "rope, nope or absent")
        scale = keys.number("residual_multiplier", 1.0)  # as in ``DecoderConfig.stream_eps``
        stream = {
            "norm_eps": plain.norm_eps / scale**2,
            "embedding_scale": keys.number("embedding_multiplier", 1.0) / scale,
        }
        fields = of_llama(plain) | {"moe": moe, "ffn_size": moe.widest if moe else size, **stream}
        return with_mamba(
            keys,
            fields,
            layer_kinds(ConfigKeys({"layer_types": kinds}), "layer_types", (LINEAR, FULL), num_layers),
            has_rope=positions == "rope",
            attention_scale=keys.number("attention_multiplier", 1.0),
            mamba_eps=plain.norm_eps,
            logit_scale=1 / keys.number("logits_scaling", 1.0),
        )


def with_mamba(keys: ConfigKeys, fields: dict[str, Any], kinds: tuple[str, ...], **more: Any) -> GraniteHybridConfig:
    """The configuration of ``fields`` with layers of these kinds."""
    mamba = read_bamba_sizes(keys, fields["hidden_size"])
    of_attention = LayerCacheSpec(fields["num_kv_heads"], fields["head_dim"])
    caches = tuple(mamba.cache if kind == LINEAR else of_attention for kind in kinds)
    return GraniteHybridConfig(**fields, kinds=kinds, caches=caches, mamba=mamba, **more)


class BambaLayer(GraniteHybridLayer):
    mlp_names = ("feed_forward.gate_proj", "feed_forward.up_proj"), "feed_forward.down_proj"
    norm_name = "pre_ff_layernorm"


class BambaForCausalLM(HybridForCausalLM):
    layer_class = BambaLayer
    names = ("model.embed_tokens", "model.layers", "model.final_layernorm", "lm_head")

    @classmethod
    def read_config(cls, keys: ConfigKeys, max_len: int | None) -> GraniteHybridConfig:
        num_layers = keys.size("num_hidden_layers")
        plain = read_llama(keys, max_len, eps=1e-5, rotary=0.5, windows=((FULL,) * num_layers, None))
        attends = keys.get("attn_layer_indices", [])
        if not isinstance(attends, list | tuple) or not all(type(i) is int for i in attends):
            raise wrong("attn_layer_indices", attends, "a list of layer numbers")
        for key in ("num_logits_to_keep", "z_loss_coefficient", "layers_block_type", "layer_types"):
            keys.get(key)
        kinds = tuple(FULL if i in attends else LINEAR for i in range(num_layers))
        return with_mamba(keys, of_llama(plain), kinds, attention_scale=plain.head_dim**-0.5, mamba_eps=plain.norm_eps)
