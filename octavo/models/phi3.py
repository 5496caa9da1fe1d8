"""Phi-3 (arXiv 2404.14219), 3.5 and Phi-4: Mistral with fused weights and partial rotary embeddings."""

from __future__ import annotations

from octavo.models.config_keys import ConfigKeys
from octavo.models.decoder import Decoder
from octavo.models.mistral import read_mistral
from octavo.models.parts import DecoderConfig, Names
from octavo.models.rope_keys import rope_values

NAMES = Names(queries=("self_attn.qkv_proj",), ups=("mlp.gate_up_proj",))


class Phi3ForCausalLM(Decoder):
    @classmethod
    def read_config(cls, keys: ConfigKeys, max_len: int | None) -> DecoderConfig:
        rope = rope_values(keys)
        if rope.get("rope_type", rope.get("type")) == "yarn" and "short_factor" in rope:
            rope["rope_type"] = "longrope"  # which the first files call so
        return read_mistral(keys, max_len, eps=1e-5, rotary=1.0, rope=rope, names=NAMES)
