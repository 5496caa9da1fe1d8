"""Mistral (arXiv 2310.06825): Llama with an optional sliding window in all layers."""

from __future__ import annotations

from typing import Any

from octavo.models.config import FULL, SLIDING, read_layer_types
from octavo.models.config_keys import ConfigKeys
from octavo.models.decoder import Decoder, read_decoder
from octavo.models.parts import DecoderConfig

WINDOW = 4096
"""The default of ``sliding_window``, as in transformers."""


def read_mistral(
    keys: ConfigKeys, max_len: int | None, default_window: int | None = None, **defaults: Any
) -> DecoderConfig:
    """Read a decoder's configuration, with ``sliding_window`` for all layers; null is none."""
    window = None if keys.has("sliding_window") else default_window
    if keys.get("sliding_window") is not None:
        window = keys.size("sliding_window")
    types = [FULL if window is None else SLIDING] * keys.size("num_hidden_layers")
    return read_decoder(keys, max_len, windows=(read_layer_types(keys, types), window), **defaults)


class MistralForCausalLM(Decoder):
    @classmethod
    def read_config(cls, keys: ConfigKeys, max_len: int | None) -> DecoderConfig:
        return read_mistral(keys, max_len, WINDOW)
