"""Mixtral (arXiv 2401.04088): Mistral with a mixture of experts in every layer, by default two per token."""

from __future__ import annotations

import dataclasses

from octavo.layers.moe import ExpertRouter, MoE
from octavo.models.config_keys import ConfigKeys
from octavo.models.llama import FeedForward, LlamaConfig, LlamaForCausalLM, LlamaLayer
from octavo.models.loader import ExpertShape, WeightLoader
from octavo.models.mistral import read_mistral
from octavo.models.moe import MoESettings, read_experts
from octavo.ops.moe import Routing


class MixtralLayer(LlamaLayer):
    def mixture(self, config: LlamaConfig, moe: MoESettings, weights: WeightLoader, prefix: str) -> FeedForward:
        name, D, X = f"{prefix}.block_sparse_moe", config.hidden_size, moe.num_experts
        shape = ExpertShape(X, D, moe.expert_size, moe.activation, gate="w1", up="w3", down="w2")
        norm = weights.norm(f"{prefix}.post_attention_layernorm", D, config.norm_eps)
        router = ExpertRouter(norm, weights.router(f"{name}.gate", X, D), Routing(moe.num_chosen, moe.normalises))
        return MoE(router, weights.experts(f"{name}.experts", shape), collective=weights.collective)


class MixtralForCausalLM(LlamaForCausalLM):
    layer_class = MixtralLayer

    @classmethod
    def read_config(cls, keys: ConfigKeys, max_len: int | None) -> LlamaConfig:
        config = read_mistral(keys, max_len, eps=1e-5, theta=1e6)
        moe = read_experts(
            keys,
            config.num_layers,
            config.ffn_size,
            config.activation,
            count_keys=("num_local_experts",),
            num_chosen=2,
            expert_size=config.ffn_size,
            normalises=True,
        )
        return dataclasses.replace(config, moe=moe, ffn_size=moe.widest)
