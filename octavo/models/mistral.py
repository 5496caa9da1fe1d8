"""Mistral (arXiv 2310.06825): Llama with an optional sliding window in all layers."""

from __future__ import annotations

from octavo.models.config import FULL, SLIDING, read_layer_types
from octavo.models.keys import ConfigKeys
from octavo.models.llama import LlamaConfig, LlamaForCausalLM, read_llama


def read_mistral(keys: ConfigKeys, max_len: int | None, eps: float = 1e-6) -> LlamaConfig:
    """Read Llama's configuration, with ``sliding_window`` for all layers."""
    has_window = keys.get("sliding_window") is not None
    window = keys.size("sliding_window") if has_window else None
    types = [SLIDING if has_window else FULL] * keys.size("num_hidden_layers")
    return read_llama(keys, max_len, eps=eps, windows=(read_layer_types(keys, types), window))


class MistralForCausalLM(LlamaForCausalLM):
    @classmethod
    def read_config(cls, keys: ConfigKeys, max_len: int | None) -> LlamaConfig:
        return read_mistral(keys, max_len)
