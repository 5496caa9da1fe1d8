"""Qwen2 and Qwen2.5 (arXiv 2407.10671): Llama with QKV biases, and optional sliding windows in upper layers."""

from __future__ import annotations

import operator
from collections.abc import Callable

from octavo.models.config_keys import ConfigKeys
from octavo.models.decoder import Decoder, read_decoder
from octavo.models.model_config import read_layer_types
from octavo.models.parts import DecoderConfig


def read_qwen(keys: ConfigKeys, max_len: int | None, slides: Callable[[int, int], bool] = operator.ge) -> DecoderConfig:
    """Read the configuration of all Qwen families: Llama's, with sliding windows if ``use_sliding_window`` is set.

    Without ``layer_types``, ``slides(layer, max_window_layers)`` decides which layers have a window.
    """
    keys.get("sliding_window")  # ignored without the flag
    window = keys.size("sliding_window", 4096) if keys.flag("use_sliding_window") else None
    first = keys.size("max_window_layers", 28, low=0)
    types = read_layer_types(keys, lambda i: window and slides(i, first))
    return read_decoder(keys, max_len, windows=(types, window))


class Qwen2ForCausalLM(Decoder):
    @classmethod
    def read_config(cls, keys: ConfigKeys, max_len: int | None) -> DecoderConfig:
        return read_qwen(keys, max_len).with_attention(has_bias=True, has_output_bias=False)
