"""OLMo 2 (arXiv 2501.00656): Llama with post-norms, and norms over all query and all key heads of a token.

Shapes: T tokens of the step, W the columns of queries, keys and values.
"""

from __future__ import annotations

from torch import Tensor

from octavo.models.config_keys import ConfigKeys
from octavo.models.llama import LlamaConfig, LlamaForCausalLM, read_llama
from octavo.models.loader import WeightLoader
from octavo.models.post_norm import NormNames, PostNormLayer


class Olmo2Layer(PostNormLayer):
    names = NormNames(None, "post_attention_layernorm", None, "post_feedforward_layernorm")

    def __init__(self, config: LlamaConfig, weights: WeightLoader, prefix: str, index: int) -> None:
        super().__init__(config, weights, prefix, index)
        q_name, k_name = (f"{prefix}.self_attn.{part}_norm" for part in "qk")
        self.q_norm = weights.head_norm(q_name, config.num_heads, config.head_dim, config.norm_eps)
        self.k_norm = weights.head_norm(k_name, config.num_kv_heads, config.head_dim, config.norm_eps)

    def prepare(self, qkv_TW: Tensor) -> Tensor:
        q_TW, k_TW, _ = qkv_TW.split_with_sizes(self.heads.sizes, dim=-1)
        q_TW.copy_(self.q_norm(q_TW))
        k_TW.copy_(self.k_norm(k_TW))
        return qkv_TW


class Olmo2ForCausalLM(LlamaForCausalLM):
    layer_class = Olmo2Layer

    @classmethod
    def read_config(cls, keys: ConfigKeys, max_len: int | None) -> LlamaConfig:
        return read_llama(keys, max_len, eps=1e-5)
