"""Phi-3 (arXiv 2404.14219), 3.5 and Phi-4: Mistral with fused weights and partial rotary embeddings."""

from __future__ import annotations

from octavo.layers.linear import Linear
from octavo.models.config_keys import ConfigKeys
from octavo.models.llama import LlamaConfig, LlamaForCausalLM, LlamaLayer
from octavo.models.loader import WeightLoader
from octavo.models.mistral import read_mistral


class Phi3Layer(LlamaLayer):
    def qkv(self, config: LlamaConfig, weights: WeightLoader, prefix: str) -> Linear:
        return weights.qkv([f"{prefix}.qkv_proj"], self.heads, config.hidden_size, config.attention_bias)

    def gate_up(self, config: LlamaConfig, weights: WeightLoader, prefix: str) -> Linear:
        return weights.gate_up([f"{prefix}.gate_up_proj"], config.ffn_size, config.hidden_size, config.mlp_bias)


class Phi3ForCausalLM(LlamaForCausalLM):
    layer_class = Phi3Layer

    @classmethod
    def read_config(cls, keys: ConfigKeys, max_len: int | None) -> LlamaConfig:
        return read_mistral(keys, max_len, eps=1e-5)
