"""Mistral Small 4 (Mistral AI): latent attention, with queries that grow with the logarithm of their position.

All layers but the first few, if any, have experts, chosen by a softmax, and a shared one.
"""

from __future__ import annotations

import dataclasses

from octavo.models.config_keys import ConfigKeys
from octavo.models.deepseek import DeepseekV2ForCausalLM, read_latent
from octavo.models.ministral3 import ROPE, growing_queries
from octavo.models.moe_config import read_dense_first, read_experts
from octavo.models.parts import DecoderConfig, ExpertsPart
from octavo.ops.moe import Routing

DEFAULT_ROPE = {**ROPE, "rope_theta": 10_000.0, "factor": 128.0, "original_max_position_embeddings": 8192}


class Mistral4ForCausalLM(DeepseekV2ForCausalLM):
    @classmethod
    def read_config(cls, keys: ConfigKeys, max_len: int | None) -> DecoderConfig:
        given, scale = growing_queries(keys, DEFAULT_ROPE)
        config, expert_size = read_latent(keys, max_len, given), keys.size("moe_intermediate_size")
        keys.must_be({"n_group": (1,), "topk_group": (1,)})
        keys.pass_over("qk_head_dim")
        moe = read_experts(
            keys,
            config,
            count_keys=("n_routed_experts", "num_local_experts"),
            num_chosen=4,
            expert_size=expert_size,
            normalises=keys.flag("norm_topk_prob", True),
            is_sparse=read_dense_first(keys, config.num_layers, keys.size("first_k_dense_replace", 0, low=0)),
            shared_size=expert_size * keys.size("n_shared_experts", 1, low=0),
        )
        routing = Routing(moe.num_chosen, moe.normalises, scale=keys.number("routed_scaling_factor", 1.0))
        part = ExpertsPart(moe=moe, routing=routing, stacked=("gate_up_proj", "down_proj"))
        return dataclasses.replace(config.with_experts(part), query_scale=scale)
