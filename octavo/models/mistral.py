"""Mistral (arXiv 2310.06825): Llama with an optional sliding window in all layers."""

from __future__ import annotations

from typing import Any

from octavo.models.config_keys import ConfigKeys
from octavo.models.decoder import Decoder, read_decoder
from octavo.models.model_config import read_layer_types
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
    types = read_layer_types(keys, lambda i: window is not None)
    return read_decoder(keys, max_len, windows=(types, window), **defaults)


class MistralForCausalLM(Decoder):
    @classmethod
    def read_config(cls, keys: ConfigKeys, max_len: int | None) -> DecoderConfig:
        return read_mistral(keys, max_len, WINDOW)
