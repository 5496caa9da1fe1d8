"""Command R (Cohere), R7B and A (Cohere 2), Cohere 2 with experts, and Compass, the text part of North Micro Vision.

Attention and the feed-forward layer have the same normalised input. Norms are LayerNorms without bias, rotated pairs
are adjacent, but for Compass. Cohere 2 has windows in three of four layers, and no positions in the fourth; in Compass,
kinds of layers have rotary embeddings of their own, or none.
"""

from __future__ import annotations

import dataclasses

from octavo.models.config_keys import ConfigKeys
from octavo.models.decoder import Decoder, read_decoder
from octavo.models.model_config import ACTIVATIONS, SLIDING, architecture, read_layer_types
from octavo.models.moe_config import read_dense_first, read_experts
from octavo.models.multimodal_text import plain_rope
from octavo.models.parts import DecoderConfig, ExpertsPart, HeadNorm, MLPPart, Names, NormPart
from octavo.ops.moe import Routing

PARALLEL = Names(before_mlp="input_layernorm")
NORM = NormPart(is_layer_norm=True, has_bias=False)


def with_scale(keys: ConfigKeys, config: DecoderConfig) -> DecoderConfig:
    """With adjacent pairs, parallel parts and scaled logits."""
    scale = keys.number("logit_scale", 0.0625)
    config = dataclasses.replace(config, is_parallel=True, logit_scale=scale)
    return config.with_attention(is_adjacent=True)


class CohereForCausalLM(Decoder):
    @classmethod
    def read_config(cls, keys: ConfigKeys, max_len: int | None) -> DecoderConfig:
        config = read_decoder(
            keys, max_len, tied=True, eps=1e-5, eps_key="layer_norm_eps", theta=5e5, names=PARALLEL, norm=NORM,
            mlp_bias=False,
        )  # fmt: skip
        norm = HeadNorm("each") if keys.flag("use_qk_norm") else None
        return with_scale(keys, config).with_attention(head_norm=norm)


class Cohere2ForCausalLM(Decoder):
    @classmethod
    def read_config(cls, keys: ConfigKeys, max_len: int | None) -> DecoderConfig:
        every = keys.size("sliding_window_pattern", keys.get("_sliding_window_pattern", 4))
        types = read_layer_types(keys, lambda i: (i + 1) % every)
        config = read_decoder(
            keys, max_len, tied=True, eps=1e-5, eps_key="layer_norm_eps", names=PARALLEL, norm=NORM, mlp_bias=False,
            windows=(types, keys.size("sliding_window", 4096)),
        )  # fmt: skip
        return with_scale(keys, config).with_attention(rope=[0 if kind == SLIDING else None for kind in types])


class CohereCompassForCausalLM(Decoder):
    @classmethod
    def read_config(cls, keys: ConfigKeys, max_len: int | None) -> DecoderConfig:
        types, given = read_layer_types(keys), keys.get("rope_parameters")
        by_type = given if isinstance(given, dict) and not set(types).isdisjoint(given) else dict.fromkeys(types, given)
        turning = {kind: plain_rope(by_type[kind]) for kind in dict.fromkeys(types) if by_type.get(kind)}
        config = read_decoder(
            keys, max_len, tied=True, eps=1e-5, eps_key="layer_norm_eps", names=PARALLEL, norm=NORM, mlp_bias=False,
            windows=(types, keys.size("sliding_window", 4096) if SLIDING in types else None), rope={},
        )  # fmt: skip
        if architecture(keys).endswith("ForSequenceClassification"):
            keys.must_be({"pooling": ("eos",)})
        keys.pass_over("pooling", "sliding_window")
        ropes = tuple(config.rope({"rope_theta": 10_000.0, **own}, max_len) for own in turning.values())
        scale = 1.0 if keys.get("logit_scale") is None else keys.number("logit_scale")
        config = dataclasses.replace(config, ropes=ropes, is_parallel=True, logit_scale=scale)
        places = {kind: i for i, kind in enumerate(turning)}
        return config.with_attention(rope=[places.get(kind) for kind in types])


class Cohere2MoeForCausalLM(Decoder):
    @classmethod
    def read_config(cls, keys: ConfigKeys, max_len: int | None) -> DecoderConfig:
        num_layers, first = keys.size("num_hidden_layers"), keys.size("first_k_dense_replace", 0, low=0)
        every, of_first = keys.size("sliding_window_pattern", 4), keys.size("prefix_dense_sliding_window_pattern", 1)
        types = read_layer_types(keys, lambda i: (i + 1) % of_first if i < first else (i - first + 1) % every)
        is_sparse = read_dense_first(keys, num_layers, first)
        is_rms = keys.get("rms_norm_eps") is not None
        config = read_decoder(
            keys,
            max_len,
            tied=True,
            eps=1e-5,
            eps_key="rms_norm_eps" if is_rms else "layer_norm_eps",
            head_dim=128,
            names=PARALLEL,
            norm=NormPart() if is_rms else NORM,
            windows=(types, keys.size("sliding_window", 4096)),
            mlp_bias=False,
        )
        keys.get("layer_norm_eps")
        ropes = [
            0 if kind == SLIDING or (not sparse and of_first == 1) else None
            for kind, sparse in zip(types, is_sparse, strict=True)
        ]
        experts, dense = cls._experts(keys, config, is_sparse)
        config = config.with_mlps(lambda i: experts if is_sparse[i] else dense)
        return with_scale(keys, config).with_attention(rope=ropes)

    @classmethod
    def _experts(
        cls, keys: ConfigKeys, config: DecoderConfig, is_sparse: tuple[bool, ...]
    ) -> tuple[ExpertsPart, MLPPart]:
        scoring = keys.choice("expert_selection_fn", {"softmax": "softmax", "sigmoid": "sigmoid"}, "softmax")
        dense_size = keys.size("prefix_dense_intermediate_size", config.ffn_size)
        combines = keys.choice("shared_expert_combination_strategy", {"average": 0.5, "sum": 1.0}, "average")
        num_shared = keys.size("num_shared_experts", 0, low=0)
        activation = keys.choice("hidden_act", ACTIVATIONS, "silu")
        moe = read_experts(
            keys,
            config,
            count_keys=("num_experts", "num_local_experts"),
            num_chosen=2,
            normalises=keys.flag("norm_topk_prob", True) or scoring == "softmax",
            is_sparse=is_sparse,
            shared_size=num_shared * config.ffn_size,
            dense_size=dense_size,
        )
        scale = combines if num_shared else 1.0
        routing = Routing(moe.num_chosen, moe.normalises, "sigmoid" if scoring == "sigmoid" else "softmax", scale)
        return ExpertsPart(moe=moe, routing=routing, shared_scale=scale), MLPPart(
            size=dense_size, activation=activation
        )
