"""Qwen3, dense (arXiv 2505.09388): Llama with every query and key head normalised before it is rotated."""

from __future__ import annotations

from octavo.models.config import ModelConfig
from octavo.models.llama import LlamaForCausalLM, LlamaLayer
from octavo.models.loader import WeightLoader
from octavo.ops.attention import HeadLayout


class Qwen3Layer(LlamaLayer):
    def head_layout(self, config: ModelConfig, weights: WeightLoader, prefix: str) -> HeadLayout:
        q_norm, k_norm = (weights.dense(f"{prefix}.{part}_norm.weight", config.head_dim) for part in "qk")
        plain = super().head_layout(config, weights, prefix)
        return plain._replace(q_norm_H=q_norm, k_norm_H=k_norm, norm_eps=config.norm_eps)


class Qwen3ForCausalLM(LlamaForCausalLM):
    layer_class = Qwen3Layer
