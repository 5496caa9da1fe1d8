"""gpt-oss (OpenAI, arXiv 2508.10925): experts in every layer, attention sinks, a window in every other layer.

The published weights of the experts are MXFP4 (``quant/mxfp4.py``).

Shapes: D model, X experts, F the width of an expert.
"""

from __future__ import annotations

import numpy as np

from octavo.layers.moe import ExpertRouter, MoE
from octavo.layers.norm import Norm
from octavo.models.config_keys import ConfigKeys
from octavo.models.decoder import Decoder, read_decoder
from octavo.models.decoder_layer import DecoderLayer, FeedForward
from octavo.models.loader import ExpertShape, WeightLoader
from octavo.models.model_config import read_layer_types
from octavo.models.moe_config import read_experts
from octavo.models.parts import DecoderConfig, ExpertsPart
from octavo.models.rope_keys import rope_values
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


class GptOssLayer(DecoderLayer):
    def mixture(
        self, config: DecoderConfig, part: ExpertsPart, weights: WeightLoader, prefix: str, before: Norm | None
    ) -> FeedForward:
        mlp, D, X, F = f"{prefix}.mlp", config.hidden_size, part.moe.num_experts, part.moe.expert_size
        routing = part.routing._replace(bias_X=weights.exact(f"{mlp}.router.bias", X))
        router = ExpertRouter(before, weights.router(f"{mlp}.router", X, D), routing)
        shape, parts = ExpertShape(X, D, F, part.moe.activation), ("weight", "weight_packed", "qweight")
        if any(weights.tensors.has(f"{mlp}.experts.0.gate_proj.{name}") for name in parts):
            experts = weights.experts(f"{mlp}.experts", shape, has_bias=True)
        else:
            gates_then_ups = np.arange(2 * F).reshape(F, 2).T.ravel()  # the checkpoint interleaves them
            experts = weights.stacked_experts(f"{mlp}.experts", shape, gates_then_ups, has_bias=True)
        return MoE(router, experts, collective=weights.collective)


class GptOssForCausalLM(Decoder):
    layer_class = GptOssLayer

    @classmethod
    def read_config(cls, keys: ConfigKeys, max_len: int | None) -> DecoderConfig:
        windows = (read_layer_types(keys, lambda i: i % 2 == 0), keys.size("sliding_window", 128))
        is_given = any(keys.get(key) is not None for key in ("rope_scaling", "rope_parameters"))
        rope = {"rope_theta": THETA, **({} if is_given else ROPE), **rope_values(keys)}
        has_bias = keys.flag("attention_bias", True)
        config = read_decoder(keys, max_len, eps=1e-5, head_dim=64, windows=windows, rope=rope, has_bias=has_bias)
        keys.choice("hidden_act", {"silu": None}, "silu")
        for key in ("experts_per_token", "initial_context_length"):  # aliases of keys that are read
            keys.get(key)
        activation = ClampedSwish(keys.number("swiglu_alpha", 1.702), keys.number("swiglu_limit", 7.0))
        count_keys = ("num_local_experts",)
        moe = read_experts(keys, config, count_keys=count_keys, num_chosen=4, normalises=True, activation=activation)
        part = ExpertsPart(moe=moe, routing=Routing(moe.num_chosen, moe.normalises))
        return config.with_attention(has_sinks=True).with_experts(part)
