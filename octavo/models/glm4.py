"""GLM-4 (arXiv 2406.12793): adjacent pairs rotated in half of each head, and fused gate and up projections.

The later checkpoints, ``Glm4``, also have norms after attention and MLP.
"""

from __future__ import annotations

import dataclasses

from octavo.layers.linear import Linear
from octavo.models.config_keys import ConfigKeys
from octavo.models.llama import LlamaConfig, LlamaForCausalLM, LlamaLayer, read_llama
from octavo.models.loader import WeightLoader
from octavo.models.post_norm import NormNames, PostNormLayer
from octavo.models.rope import half_split_rows


class GlmLayer(LlamaLayer):
    def qkv(self, config: LlamaConfig, weights: WeightLoader, prefix: str) -> Linear:
        names = [f"{prefix}.{part}_proj" for part in "qkv"]
        queries, keys = (
            half_split_rows(count, config.head_dim, config.rotary_width)
            for count in (config.num_heads, config.num_kv_heads)
        )
        orders = (queries, keys, None)
        return weights.qkv(names, self.heads, config.hidden_size, config.attention_bias, orders=orders)

    def gate_up(self, config: LlamaConfig, weights: WeightLoader, prefix: str) -> Linear:
        return weights.gate_up([f"{prefix}.gate_up_proj"], config.ffn_size, config.hidden_size, config.mlp_bias)


class Glm4Layer(PostNormLayer, GlmLayer):
    names = NormNames("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm")


class GlmForCausalLM(LlamaForCausalLM):
    layer_class = GlmLayer

    @classmethod
    def read_config(cls, keys: ConfigKeys, max_len: int | None) -> LlamaConfig:
        config = read_llama(keys, max_len, eps=1.5625e-7, head_dim=128, rotary=0.5)
        return dataclasses.replace(config, attention_bias=keys.flag("attention_bias", True), output_bias=False)


class Glm4ForCausalLM(GlmForCausalLM):
    layer_class = Glm4Layer
