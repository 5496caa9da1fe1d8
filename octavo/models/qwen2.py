"""Qwen2 and Qwen2.5 (arXiv 2407.10671): Llama with biases on queries, keys and values, and windows in upper layers."""

from __future__ import annotations

import dataclasses

from octavo.models.config import FULL, SLIDING, read_layer_types
from octavo.models.keys import ConfigKeys
from octavo.models.llama import LlamaConfig, LlamaForCausalLM, read_llama


def read_qwen(keys: ConfigKeys, max_len: int | None) -> LlamaConfig:
    """The keys of all Qwen families: Llama's, with windows from ``max_window_layers`` on if they are asked for."""
    given = keys.size("sliding_window", 4096)
    window = given if keys.flag("use_sliding_window") else None
    first = keys.size("max_window_layers", 28, low=0)
    types = [SLIDING if window and i >= first else FULL for i in range(keys.size("num_hidden_layers"))]
    return read_llama(keys, max_len, windows=(read_layer_types(keys, types), window))


class Qwen2ForCausalLM(LlamaForCausalLM):
    @classmethod
    def read_config(cls, keys: ConfigKeys, max_len: int | None) -> LlamaConfig:
        return dataclasses.replace(read_qwen(keys, max_len), attention_bias=True, output_bias=False)
