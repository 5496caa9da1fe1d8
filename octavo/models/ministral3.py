"""Ministral 3 (Mistral AI): Mistral with YaRN, whose queries grow with the logarithm of their position."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from octavo.models.config_keys import ConfigKeys
from octavo.models.decoder import Decoder
from octavo.models.mistral import read_mistral
from octavo.models.parts import DecoderConfig, QueryScale
from octavo.models.rope_keys import rope_values

ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1_000_000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16_384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
"""The default rotary embedding."""


def growing_queries(keys: ConfigKeys, default: Mapping[str, Any]) -> tuple[dict[str, Any], QueryScale | None]:
    """The rotary keys, by default these, and the factors of queries by position, if there are any."""
    is_given = any(keys.get(key) is not None for key in ("rope_parameters", "rope_scaling"))
    given = rope_values(keys) if is_given else dict(default)
    given.pop("max_position_embeddings", None)
    beta = given.pop("llama_4_scaling_beta", None)
    if beta is None:
        return given, None
    period = ConfigKeys(given).size("original_max_position_embeddings")
    return given, QueryScale(ConfigKeys({"beta": beta}).number("beta"), period)


class Ministral3ForCausalLM(Decoder):
    @classmethod
    def read_config(cls, keys: ConfigKeys, max_len: int | None) -> DecoderConfig:
        given, scale = growing_queries(keys, ROPE)
        config = read_mistral(keys, max_len, eps=1e-5, head_dim=128, rope=given, has_bias=False, mlp_bias=False)
        return dataclasses.replace(config.with_attention(scales_queries=scale is not None), query_scale=scale)
