"""The text part of Gemma 3 (arXiv 2503.19786): Gemma 2 with normalised query and key heads instead of soft caps.

Five of six layers have a sliding window and their own rotary frequencies; the sixth has full attention.
"""

from __future__ import annotations

from typing import Any

from octavo.models.config_keys import ConfigKeys
from octavo.models.gemma2 import NAMES, GemmaForCausalLM, read_gemma, with_softcaps
from octavo.models.model_config import FULL, SLIDING, read_layer_types
from octavo.models.olmo import with_local_rope
from octavo.models.parts import DecoderConfig, HeadNorm
from octavo.models.rope_keys import rope_values, ropes_by_kind


def rope_keys(keys: ConfigKeys) -> tuple[dict[str, Any], dict[str, Any]]:
    """Rotary keys of the full-attention layers, and those of the sliding-window layers."""
    by_kind = ropes_by_kind(keys, (FULL, SLIDING))
    if by_kind is not None:
        return by_kind[0], by_kind[1]
    return rope_values(keys), {"rope_theta": keys.number("rope_local_base_freq", 10_000.0)}


class Gemma3ForCausalLM(GemmaForCausalLM):
    @classmethod
    def read_config(cls, keys: ConfigKeys, max_len: int | None) -> DecoderConfig:
        keys.get("hidden_act")  # the older key; hidden_activation takes precedence
        full, local = rope_keys(keys)
        every = keys.size("sliding_window_pattern", keys.get("_sliding_window_pattern", 6))
        types = read_layer_types(keys, lambda i: (i + 1) % every)
        windows = (types, keys.size("sliding_window", 4096))
        config = read_gemma(keys, max_len, windows=windows, rope={"rope_theta": 1_000_000.0, **full}, names=NAMES)
        config = with_softcaps(keys, config, softcap=0.0, final_softcap=0.0)
        config = config.with_attention(head_norm=HeadNorm(offset=config.norm.offset))
        return with_local_rope(config, local, types, max_len)
