"""Qwen3, dense (arXiv 2505.09388): Qwen2 with query and key heads normalised before rotation."""

from __future__ import annotations

from octavo.models.config_keys import ConfigKeys
from octavo.models.llama import LlamaConfig, LlamaForCausalLM, LlamaLayer
from octavo.models.loader import WeightLoader
from octavo.models.qwen2 import read_qwen
from octavo.ops.attention import HeadLayout


class Qwen3Layer(LlamaLayer):
    def head_layout(self, config: LlamaConfig, weights: WeightLoader, prefix: str, index: int) -> HeadLayout:
        q_norm, k_norm = (weights.dense(f"{prefix}.{part}_norm.weight", config.head_dim) for part in "qk")
        plain = super().head_layout(config, weights, prefix, index)
        return plain._replace(q_norm_H=q_norm, k_norm_H=k_norm, norm_eps=config.norm_eps)


class Qwen3ForCausalLM(LlamaForCausalLM):
    layer_class = Qwen3Layer

    @classmethod
    def read_config(cls, keys: ConfigKeys, max_len: int | None) -> LlamaConfig:
        return read_qwen(keys, max_len)
