"""OLMo 2 (arXiv 2501.00656): Llama with post-norms, and norms over all query and all key heads of a token."""

from __future__ import annotations

from octavo.models.config_keys import ConfigKeys
from octavo.models.decoder import Decoder, read_decoder
from octavo.models.olmo import AFTER, JOINT
from octavo.models.parts import DecoderConfig


class Olmo2ForCausalLM(Decoder):
    @classmethod
    def read_config(cls, keys: ConfigKeys, max_len: int | None) -> DecoderConfig:
        return read_decoder(keys, max_len, eps=1e-5, names=AFTER).with_attention(head_norm=JOINT)
