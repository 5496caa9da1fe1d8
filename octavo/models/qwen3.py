"""Qwen3, dense (arXiv 2505.09388): Qwen2 with query and key heads normalised before rotation."""

from __future__ import annotations

from octavo.models.config_keys import ConfigKeys
from octavo.models.decoder import Decoder
from octavo.models.parts import DecoderConfig, HeadNorm
from octavo.models.qwen2 import read_qwen


class Qwen3ForCausalLM(Decoder):
    @classmethod
    def read_config(cls, keys: ConfigKeys, max_len: int | None) -> DecoderConfig:
        return read_qwen(keys, max_len).with_attention(head_norm=HeadNorm())
