"""Hunyuan (Tencent), dense and with experts, and Hy3.

Hunyuan normalises queries and keys after their rotation; its ``dynamic`` rotary embedding with ``alpha`` has a larger
base for all lengths. Hy3 normalises them before, and routes by sigmoids with a correction.
"""

from __future__ import annotations

from typing import Any

from octavo.models.config_keys import ConfigKeys, wrong
from octavo.models.decoder import Decoder, read_decoder
from octavo.models.model_config import ACTIVATIONS
from octavo.models.moe_config import read_dense_first, read_experts
from octavo.models.parts import DecoderConfig, ExpertsPart, HeadNorm, Names
from octavo.models.rope_keys import rope_values
from octavo.ops.moe import Routing

NAMES = Names(head_norms=("self_attn.query_layernorm", "self_attn.key_layernorm"))

SHARED = ("mlp.shared_mlp.gate_proj", "mlp.shared_mlp.up_proj")


def read_hunyuan(keys: ConfigKeys, max_len: int | None) -> DecoderConfig:
    """Read the keys of the dense model."""
    keys.get("eod_token_id")
    given = rope_values(keys)
    if given.get("rope_type", given.get("type")) == "dynamic" and given.get("alpha"):
        given = _with_alpha(given, keys)
    config = read_decoder(keys, max_len, eps=1e-5, rope=given, names=NAMES, mlp_bias=False)
    return config.with_attention(head_norm=HeadNorm(is_after_rope=True))


def _with_alpha(given: dict[str, Any], keys: ConfigKeys) -> dict[str, Any]:
    alpha = ConfigKeys(given).number("alpha")
    width = keys.get("head_dim") or keys.size("hidden_size") // keys.size("num_attention_heads")
    if width < 4:
        raise wrong("head_dim", width, "at least 4")
    return {"rope_theta": given.get("rope_theta", 10_000.0) * alpha ** (width / (width - 2))}


class HunYuanDenseV1ForCausalLM(Decoder):
    @classmethod
    def read_config(cls, keys: ConfigKeys, max_len: int | None) -> DecoderConfig:
        return read_hunyuan(keys, max_len)


class HunYuanMoEV1ForCausalLM(Decoder):
    @classmethod
    def read_config(cls, keys: ConfigKeys, max_len: int | None) -> DecoderConfig:
        config = read_hunyuan(keys, max_len)
        chosen = _same(keys, "moe_topk", 1)
        moe = read_experts(
            ConfigKeys({"num_experts": _same(keys, "num_experts", 1), "num_experts_per_tok": chosen}),
            config,
            count_keys=("num_experts",),
            num_chosen=chosen,
            normalises=True,
            shared_size=config.ffn_size,
            activation=keys.choice("hidden_act", ACTIVATIONS, "silu"),
        )
        part = ExpertsPart(
            moe=moe,
            routing=Routing(moe.num_chosen, normalises=True),
            router="mlp.gate.wg",
            shared=SHARED,
            shared_down="mlp.shared_mlp.down_proj",
        )
        return config.with_experts(part)


def _same(keys: ConfigKeys, key: str, default: int) -> int:
    """A number that may be given for each layer, if it is the same for all."""
    value = keys.get(key, default)
    if isinstance(value, list) and value and all(item == value[0] for item in value):
        value = value[0]
    return ConfigKeys({key: value}).size(key)


class HYV3ForCausalLM(Decoder):
    @classmethod
    def read_config(cls, keys: ConfigKeys, max_len: int | None) -> DecoderConfig:
        config = read_decoder(keys, max_len, eps=1e-5, head_dim=128, theta=11_158_840.0)
        expert_size = keys.size("moe_intermediate_size", 1536)
        keys.get("enable_moe_fp32_combine")  # sums are taken in float32 always
        moe = read_experts(
            keys,
            config,
            count_keys=("num_experts", "num_local_experts"),
            num_chosen=8,
            expert_size=expert_size,
            normalises=True,
            is_sparse=read_dense_first(keys, config.num_layers, 1),
            shared_size=expert_size * keys.size("num_shared_experts", 1),
        )
        scale = keys.number("router_scaling_factor", 2.826)
        part = ExpertsPart(
            moe=moe,
            routing=Routing(moe.num_chosen, True, "sigmoid", scale),
            router="mlp.router.gate",
            correction="mlp.expert_bias",
            shared=SHARED,
            shared_down="mlp.shared_mlp.down_proj",
            shared_has_bias=keys.flag("mlp_bias"),
        )
        config = config.with_experts(part)
        return config.with_attention(head_norm=HeadNorm())
