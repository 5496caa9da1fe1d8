"""Llama (arXiv 2302.13971 and 2407.21783), models of the same architecture, CWM (arXiv 2510.02387), Helium (Kyutai).

CWM has sliding windows in three of four layers; Helium rotates adjacent pairs.
"""

from __future__ import annotations

from octavo.models.config_keys import ConfigKeys
from octavo.models.decoder import Decoder, read_decoder
from octavo.models.model_config import read_layer_types
from octavo.models.parts import DecoderConfig
from octavo.models.rope_keys import rope_values

CWM_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 1_000_000.0,
    "factor": 16.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
"""The default rotary embedding of CWM."""


class LlamaForCausalLM(Decoder):
    pass


class CwmForCausalLM(Decoder):
    @classmethod
    def read_config(cls, keys: ConfigKeys, max_len: int | None) -> DecoderConfig:
        types = read_layer_types(keys, lambda i: i % 4)
        spans = (types, keys.size("sliding_window", 8192))
        rope = rope_values(keys) or CWM_ROPE
        return read_decoder(keys, max_len, eps=1e-5, head_dim=128, rope=rope, windows=spans, has_bias=False)


class HeliumForCausalLM(Decoder):
    @classmethod
    def read_config(cls, keys: ConfigKeys, max_len: int | None) -> DecoderConfig:
        config = read_decoder(keys, max_len, eps=1e-8, head_dim=128, theta=100_000.0)
        return config.with_attention(is_adjacent=True, has_output_bias=False)
