"""Seed-OSS (ByteDance): Llama with biases of queries, keys and values."""

from __future__ import annotations

from octavo.models.config_keys import ConfigKeys
from octavo.models.decoder import Decoder, read_decoder
from octavo.models.parts import DecoderConfig


class SeedOssForCausalLM(Decoder):
    @classmethod
    def read_config(cls, keys: ConfigKeys, max_len: int | None) -> DecoderConfig:
        has_bias, has_output_bias = keys.flag("attention_bias", True), keys.flag("attention_out_bias")
        keys.get("residual_dropout")
        config = read_decoder(keys, max_len, head_dim=128, has_bias=has_bias)
        return config.with_attention(has_output_bias=has_output_bias)
