"""MiMo-V2 (Xiaomi): value heads narrower than key heads, windows with attention sinks, experts chosen by sigmoids."""

from __future__ import annotations

from octavo.models.config_keys import ConfigKeys
from octavo.models.decoder import Decoder, read_decoder
from octavo.models.glm_moe import with_sigmoid_experts
from octavo.models.model_config import SLIDING, read_layer_types
from octavo.models.olmo import ropes_by_type, with_local_rope
from octavo.models.parts import DecoderConfig, Names

NAMES = Names(sinks="self_attn.attention_sink_bias")
ROTATED = 0.334
"""The default part of a head that is rotated."""


class MiMoV2FlashForCausalLM(Decoder):
    @classmethod
    def read_config(cls, keys: ConfigKeys, max_len: int | None) -> DecoderConfig:
        types = read_layer_types(keys, lambda i: i and (i + 1) % 6)
        full, local = ropes_by_type(keys, theta=5e6, local_theta=1e4)
        spans = (types, keys.size("sliding_window", 129))
        config = read_decoder(
            keys, max_len, eps=1e-5, head_dim=192, rotary=ROTATED, rope=full, windows=spans, names=NAMES, mlp_bias=False
        )
        config = with_local_rope(config, local, types, max_len, rotary=ROTATED)
        config = with_sigmoid_experts(keys, config, first=1, chosen=8, shared=0, normalises=True)
        value_dim, scale = keys.size("v_head_dim", 128), keys.number("attention_value_scale", 0.707)
        count = config.num_kv_heads
        return config.with_attention(
            num_kv_heads=[2 * count if kind == SLIDING else count for kind in types],
            has_sinks=[kind == SLIDING for kind in types],
            value_dim=value_dim,
            value_scale=scale,
            has_output_bias=False,
        )
