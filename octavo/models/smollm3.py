"""SmolLM3 (Hugging Face): Llama without positions in every fourth layer (NoPE, arXiv 2501.18795)."""

from __future__ import annotations

from octavo.models.config_keys import ConfigKeys, wrong
from octavo.models.decoder import Decoder, read_decoder
from octavo.models.model_config import read_layer_types
from octavo.models.parts import DecoderConfig


def rotated_layers(keys: ConfigKeys, num_layers: int, every: int) -> list[bool]:
    """Whether each layer has rotary positions: by ``no_rope_layers``, whose 0 says no, or all but each ``every``-th."""
    flags = keys.get("no_rope_layers")
    if not flags:
        return [(i + 1) % every != 0 for i in range(num_layers)]
    if not isinstance(flags, list | tuple) or len(flags) < num_layers or not all(flag in (0, 1) for flag in flags):
        raise wrong("no_rope_layers", flags, f"a list of {num_layers}, each 0 or 1")
    return [bool(flag) for flag in flags[:num_layers]]


class SmolLM3ForCausalLM(Decoder):
    @classmethod
    def read_config(cls, keys: ConfigKeys, max_len: int | None) -> DecoderConfig:
        num_layers = keys.size("num_hidden_layers")
        has_rope = rotated_layers(keys, num_layers, keys.size("no_rope_layer_interval", 4))
        window = None if keys.get("sliding_window") is None else keys.size("sliding_window")
        slides = keys.flag("use_sliding_window") and window is not None
        types = read_layer_types(keys, lambda i: slides and not has_rope[i])  # which count without the flag, too
        config = read_decoder(keys, max_len, tied=True, theta=2e6, windows=(types, window))
        return config.with_attention(rope=[0 if has else None for has in has_rope])
