"""OLMo (arXiv 2402.00838), OLMo 3 (arXiv 2512.13961), OLMoE (arXiv 2409.02060) and FlexOlmo (arXiv 2507.07024).

OLMo has LayerNorms without weights; all but the first have norms over all query and all key heads of a token. OLMo 3 is
OLMo 2 with sliding windows in three of four layers, whose rotary embedding is not scaled; FlexOlmo is OLMo 2 with
experts.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from octavo.models.config_keys import ConfigKeys
from octavo.models.decoder import Decoder, read_decoder
from octavo.models.model_config import FULL, SLIDING, read_layer_types
from octavo.models.moe_config import read_experts
from octavo.models.parts import DecoderConfig, ExpertsPart, HeadNorm, Names, NormPart
from octavo.models.rope_keys import rope_values, ropes_by_kind, rotary_width
from octavo.ops.moe import Routing

AFTER = Names(
    before_attention=None,
    after_attention="post_attention_layernorm",
    before_mlp=None,
    after_mlp="post_feedforward_layernorm",
)
"""Norms of what attention and the feed-forward layer give, alone."""
JOINT = HeadNorm("all")


def read_clip(keys: ConfigKeys) -> float:
    """The limit of queries, keys and values, 0 for none."""
    return 0.0 if keys.get("clip_qkv") is None else keys.number("clip_qkv")


class OlmoForCausalLM(Decoder):
    @classmethod
    def read_config(cls, keys: ConfigKeys, max_len: int | None) -> DecoderConfig:
        norm = NormPart(is_layer_norm=True, has_weight=False, has_bias=False)
        config = read_decoder(keys, max_len, norm=norm, mlp_bias=False)
        return dataclasses.replace(config.with_attention(clip=read_clip(keys)), norm_eps=1e-5)


def with_olmo_experts(keys: ConfigKeys, config: DecoderConfig, chosen: int) -> DecoderConfig:
    """With experts in all layers; ``chosen`` is a family's default."""
    normalises = keys.flag("norm_topk_prob")
    moe = read_experts(keys, config, count_keys=("num_experts",), num_chosen=chosen, normalises=normalises)
    return config.with_experts(ExpertsPart(moe=moe, routing=Routing(moe.num_chosen, normalises)))


class OlmoeForCausalLM(Decoder):
    @classmethod
    def read_config(cls, keys: ConfigKeys, max_len: int | None) -> DecoderConfig:
        config = read_decoder(keys, max_len, eps=1e-5, mlp_bias=False)
        return with_olmo_experts(keys, config, 8).with_attention(head_norm=JOINT, clip=read_clip(keys))


class FlexOlmoForCausalLM(Decoder):
    @classmethod
    def read_config(cls, keys: ConfigKeys, max_len: int | None) -> DecoderConfig:
        config = read_decoder(keys, max_len, theta=500_000.0, names=AFTER, mlp_bias=False)
        return with_olmo_experts(keys, config, 5).with_attention(head_norm=JOINT)


def ropes_by_type(keys: ConfigKeys, theta: float, local_theta: float | None = None) -> tuple[dict[str, Any], ...]:
    """Rotary keys of full-attention layers, and of sliding ones, which are never scaled unless said to be."""
    by_kind = ropes_by_kind(keys, (FULL, SLIDING))
    if by_kind is not None:
        return {"rope_theta": theta, **by_kind[0]}, {"rope_theta": local_theta or theta, **by_kind[1]}
    given = {"rope_theta": theta, **rope_values(keys)}
    return given, {"rope_theta": local_theta or given["rope_theta"]}


def with_local_rope(
    config: DecoderConfig,
    local: dict[str, Any],
    types: tuple[str, ...],
    max_len: int | None,
    rotary: float | None = None,
) -> DecoderConfig:
    """With another rotary embedding in sliding layers, if there are any."""
    if SLIDING not in types:
        return config
    rope = config.rope(local, max_len, rotary_width(local, config.head_dim, rotary))
    config = dataclasses.replace(config, ropes=(*config.ropes, rope))
    return config.with_attention(rope=[int(kind == SLIDING) for kind in types])


class Olmo3ForCausalLM(Decoder):
    @classmethod
    def read_config(cls, keys: ConfigKeys, max_len: int | None) -> DecoderConfig:
        types = read_layer_types(keys, lambda i: (i + 1) % 4)
        full, local = ropes_by_type(keys, theta=500_000.0)
        spans = (types, keys.size("sliding_window", 4096))
        config = read_decoder(keys, max_len, eps=1e-5, rope=full, windows=spans, names=AFTER, mlp_bias=False)
        return with_local_rope(config, local, types, max_len).with_attention(head_norm=JOINT)
