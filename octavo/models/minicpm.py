"""MiniCPM (arXiv 2404.06395), and MiniCPM 3, which has latent attention: factors of embeddings, layers and logits."""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar

from octavo.models.config_keys import ConfigKeys, wrong
from octavo.models.decoder import Decoder, read_decoder
from octavo.models.deepseek import DeepseekV2ForCausalLM, read_latent
from octavo.models.parts import DecoderConfig

C = TypeVar("C", bound=DecoderConfig)
DEFAULTS = {
    "max_position_embeddings": 32_768,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "kv_lora_rank": 256,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "scale_emb": 12,
    "scale_depth": 1.4,
    "dim_model_base": 256,
}
"""Of MiniCPM 3."""


def with_factors(keys: ConfigKeys, config: C) -> C:
    """With the factors of embeddings, of what layers add, and of logits."""
    count, width = config.num_layers, config.hidden_size
    return dataclasses.replace(
        config,
        embedding_scale=keys.number("scale_emb", 1.0),
        residual_scale=keys.number("scale_depth", count**0.5) / count**0.5,
        logit_scale=keys.number("dim_model_base", width) / width,
    )


class MiniCPMForCausalLM(Decoder):
    @classmethod
    def read_config(cls, keys: ConfigKeys, max_len: int | None) -> DecoderConfig:
        if keys.get("sparse_config") is not None:
            raise wrong("sparse_config", keys.get("sparse_config"), "absent; sparse attention is not implemented")
        keys.pass_over("mup_denominator", *(["num_experts"] if keys.values.get("num_experts") == 0 else []))
        tied = keys.flag("tie_word_embeddings", True)
        return dataclasses.replace(with_factors(keys, read_decoder(keys, max_len)), tie_word_embeddings=tied)


class MiniCPM3ForCausalLM(DeepseekV2ForCausalLM):
    @classmethod
    def read_config(cls, keys: ConfigKeys, max_len: int | None) -> DecoderConfig:
        given: dict[str, Any] = {key: value for key, value in keys.values.items() if value is not None}
        value_dim = keys.size("hidden_size") // keys.size("num_attention_heads")
        own = keys.over({**DEFAULTS, "v_head_dim": value_dim, "rope_interleave": False, **given})
        keys.pass_over("qk_head_dim")
        return with_factors(own, read_latent(own, max_len))
