"""Mistral (arXiv 2310.06825): Llama with an optional sliding window in all layers."""

from __future__ import annotations

from octavo.models.config import FULL, SLIDING, read_layer_types
from octavo.models.config_keys import ConfigKeys
from octavo.models.llama import LlamaConfig, LlamaForCausalLM, read_llama
from octavo.models.rope import rope_values

WINDOW = 4096
"""The default of ``sliding_window``, as in transformers."""


def read_mistral(
    keys: ConfigKeys, max_len: int | None, eps: float = 1e-6, theta: float = 10_000.0, default_window: int | None = None
) -> LlamaConfig:
    """Read Llama's configuration, with ``sliding_window`` for all layers; null is none."""
    window = None if keys.has("sliding_window") else default_window
    if keys.get("sliding_window") is not None:
        window = keys.size("sliding_window")
    types = [FULL if window is None else SLIDING] * keys.size("num_hidden_layers")
    windows, rope = (read_layer_types(keys, types), window), {"rope_theta": theta, **rope_values(keys)}
    return read_llama(keys, max_len, eps=eps, windows=windows, rope=rope)


class MistralForCausalLM(LlamaForCausalLM):
    @classmethod
    def read_config(cls, keys: ConfigKeys, max_len: int | None) -> LlamaConfig:
        return read_mistral(keys, max_len, default_window=WINDOW)
