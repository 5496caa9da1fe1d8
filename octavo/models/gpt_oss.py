"""gpt-oss (OpenAI, arXiv 2508.10925): experts in every layer, attention sinks, a window in every other layer.

The published weights of the experts are MXFP4 (``quant/mxfp4.py``).

Shapes: D model, X experts, F the width of an expert.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from octavo.layers.moe import ExpertRouter, MoE
from octavo.models.config import FULL, SLIDING, read_layer_types
from octavo.models.config_keys import ConfigKeys
from octavo.models.llama import FeedForward, LlamaConfig, LlamaForCausalLM, LlamaLayer, read_llama
from octavo.models.loader import ExpertShape, WeightLoader
from octavo.models.moe import MoESettings, read_experts
from octavo.models.rope import rope_values
from octavo.ops.attention import HeadLayout
from octavo.ops.moe import ClampedSwish, Routing

THETA = 150_000.0
ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
"""The default rotary scaling, for a configuration without any."""


class GptOssLayer(LlamaLayer):
    def head_layout(self, config: LlamaConfig, weights: WeightLoader, prefix: str, index: int) -> HeadLayout:
        plain = super().head_layout(config, weights, prefix, index)
        return plain._replace(sinks_N=weights.exact(f"{prefix}.sinks", config.num_heads))

    def mixture(self, config: LlamaConfig, moe: MoESettings, weights: WeightLoader, prefix: str) -> FeedForward:
        mlp, D, X, F = f"{prefix}.mlp", config.hidden_size, moe.num_experts, moe.expert_size
        routing = Routing(moe.num_chosen, moe.normalises, bias_X=weights.exact(f"{mlp}.router.bias", X))
        norm = weights.norm(f"{prefix}.post_attention_layernorm", D, config.norm_eps)
        router = ExpertRouter(norm, weights.router(f"{mlp}.router", X, D), routing)
        shape = ExpertShape(X, D, F, moe.activation)
        parts = ("weight", "weight_packed", "qweight")
        if any(weights.tensors.has(f"{mlp}.experts.0.gate_proj.{part}") for part in parts):
            experts = weights.experts(f"{mlp}.experts", shape, has_bias=True)
            return MoE(router, experts, collective=weights.collective)
        gates_then_ups = np.arange(2 * F).reshape(F, 2).T.ravel()  # the checkpoint interleaves them
        return MoE(
            router,
            weights.stacked_experts(f"{mlp}.experts", shape, gates_then_ups, has_bias=True),
            collective=weights.collective,
        )


class GptOssForCausalLM(LlamaForCausalLM):
    layer_class = GptOssLayer

    @classmethod
    def read_config(cls, keys: ConfigKeys, max_len: int | None) -> LlamaConfig:
        kinds = [FULL if i % 2 else SLIDING for i in range(keys.size("num_hidden_layers"))]
        windows = (read_layer_types(keys, kinds), keys.size("sliding_window", 128))
        is_given = any(keys.get(key) is not None for key in ("rope_scaling", "rope_parameters"))
        rope = {"rope_theta": THETA, **({} if is_given else ROPE), **rope_values(keys)}
        config = read_llama(keys, max_len, eps=1e-5, head_dim=64, windows=windows, rope=rope)
        has_bias = keys.flag("attention_bias", True)
        keys.choice("hidden_act", {"silu": None}, "silu")
        for key in ("experts_per_token", "initial_context_length"):  # aliases of keys that are read
            keys.get(key)
        moe = read_experts(
            keys,
            config.num_layers,
            config.ffn_size,
            ClampedSwish(keys.number("swiglu_alpha", 1.702), keys.number("swiglu_limit", 7.0)),
            count_keys=("num_local_experts",),
            num_chosen=4,
            expert_size=config.ffn_size,
            normalises=True,
        )
        return dataclasses.replace(config, attention_bias=has_bias, output_bias=has_bias, moe=moe, ffn_size=moe.widest)
