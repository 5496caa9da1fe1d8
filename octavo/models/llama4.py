"""The text part of Llama 4 (Meta): adjacent rotated pairs, layers without positions, experts with scaled inputs.

Layers with positions attend within chunks of the context; contexts are limited to one chunk, so that this is full
attention.

Shapes: T tokens, D model, S experts selected per token.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from octavo.layers.moe import MoE
from octavo.models.config_keys import ConfigKeys, wrong
from octavo.models.decoder import Decoder, read_decoder
from octavo.models.decoder_layer import DecoderLayer, FeedForward
from octavo.models.loader import WeightLoader
from octavo.models.model_config import ACTIVATIONS
from octavo.models.moe_config import read_experts
from octavo.models.parts import DecoderConfig, ExpertsPart, HeadNorm, MLPPart, Names, QueryScale
from octavo.models.smollm3 import rotated_layers
from octavo.ops.moe import Routing

NAMES = Names(ups=("feed_forward.gate_proj", "feed_forward.up_proj"), down="feed_forward.down_proj")


class ScaledInputs(MoE):
    """A mixture whose shares multiply what the experts get, not what they give."""

    def _sum(self, h_TD: Tensor, ids_TS: Tensor, shares_TS: Tensor, residual_TD: Tensor | None) -> Tensor:
        (T, S), D = ids_TS.shape, h_TD.shape[1]
        scaled = (h_TD.unsqueeze(1) * shares_TS.unsqueeze(-1).to(h_TD.dtype)).view(T * S, D)
        each = self.experts(scaled, ids_TS.view(-1, 1), torch.ones_like(shares_TS).view(-1, 1))
        y_TD = each.view(T, S, D).sum(dim=1)
        if residual_TD is not None:
            y_TD = residual_TD.add_(y_TD)
        return y_TD if self.shared is None else self.shared(h_TD, y_TD)


class Llama4Layer(DecoderLayer):
    def feed_forward(self, config: DecoderConfig, weights: WeightLoader, prefix: str, index: int) -> FeedForward:
        mlp = super().feed_forward(config, weights, prefix, index)
        if not isinstance(mlp, MoE):
            return mlp
        return ScaledInputs(mlp.router, mlp.experts, mlp.shared, mlp.collective)


class Llama4ForCausalLM(Decoder):
    layer_class = Llama4Layer

    @classmethod
    def read_config(cls, keys: ConfigKeys, max_len: int | None) -> DecoderConfig:
        num_layers = keys.size("num_hidden_layers")
        has_rope = rotated_layers(keys, num_layers, keys.size("no_rope_layer_interval", 4))
        kinds = ("chunked_attention", "full_attention")
        types = keys.choices("layer_types", kinds, num_layers) or [kinds[not has] for has in has_rope]
        values = {key: value for key, value in keys.values.items() if key != "layer_types"}
        if kinds[0] in types and keys.get("attention_chunk_size", 8192) is not None:
            most = min(keys.size("max_position_embeddings"), keys.size("attention_chunk_size", 8192))
            values["max_position_embeddings"] = most
        config = read_decoder(
            keys.over(values), max_len, eps=1e-5, head_dim=128, theta=5e5, names=NAMES, mlp_bias=False
        )
        norm = HeadNorm(has_weight=False) if keys.flag("use_qk_norm", True) else None
        config = config.with_attention(
            is_adjacent=True,
            rope=[0 if has else None for has in has_rope],
            head_norm=[norm if has else None for has in has_rope],
        )
        tunes = keys.flag("attn_temperature_tuning", True)
        scale = QueryScale(keys.number("attn_scale", 0.1), keys.size("floor_scale", 8192), offset=1)
        if tunes:
            config = dataclasses.replace(config, query_scale=scale)
            config = config.with_attention(scales_queries=[not has for has in has_rope])
        return cls._with_experts(keys, config)

    @staticmethod
    def _with_experts(keys: ConfigKeys, config: DecoderConfig) -> DecoderConfig:
        step, num_layers = keys.size("interleave_moe_layer_step", 1), config.num_layers
        layers = keys.get("moe_layers", list(range(step - 1, num_layers, step)))
        if not isinstance(layers, list | tuple) or not all(isinstance(layer, int) for layer in layers):
            raise wrong("moe_layers", layers, "a list of layer numbers")
        activation, size = keys.choice("hidden_act", ACTIVATIONS, "silu"), config.ffn_size
        moe = read_experts(
            keys,
            config,
            count_keys=("num_local_experts",),
            num_chosen=1,
            normalises=False,
            is_sparse=tuple(i in layers for i in range(num_layers)),
            shared_size=size,
            dense_size=keys.size("intermediate_size_mlp", 2 * size),
        )
        part = ExpertsPart(
            moe=moe,
            routing=Routing(moe.num_chosen, scoring="sigmoid"),
            router="feed_forward.router",
            experts="feed_forward.experts",
            stacked=("gate_up_proj", "down_proj"),
            shared=("feed_forward.shared_expert.gate_proj", "feed_forward.shared_expert.up_proj"),
            shared_down="feed_forward.shared_expert.down_proj",
        )
        dense = MLPPart(size=moe.dense_size, activation=activation)
        return config.with_mlps(lambda i: part if moe.is_sparse[i] else dense)
