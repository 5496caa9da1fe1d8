"""gpt-oss (OpenAI, arXiv 2508.10925): experts in every layer, a sink for every head, every other layer with a window.

The published weights of the experts are MXFP4; they are widened when they are loaded, to four times their bytes.

Shapes: D model, X experts, F the width of an expert.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.layers.moe import MoE, TopLogitsRouter
from octavo.models.config import FULL, SLIDING, read_layer_types
from octavo.models.keys import ConfigKeys, wrong
from octavo.models.llama import FeedForward, LlamaConfig, LlamaForCausalLM, LlamaLayer, read_llama
from octavo.models.loader import ExpertShape, WeightLoader
from octavo.models.mixtral import MoEConfig, with_experts
from octavo.models.rope import rope_values
from octavo.ops.attention import HeadLayout
from octavo.ops.moe import ClampedSwish, Experts
from octavo.weights.mxfp4 import BLOCK, decode_mxfp4

ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
"""Of a configuration that says nothing about it."""


@dataclass(frozen=True, kw_only=True)
class GptOssConfig(MoEConfig):
    gate: ClampedSwish


class GptOssLayer(LlamaLayer):
    def head_layout(self, config: LlamaConfig, weights: WeightLoader, prefix: str, index: int) -> HeadLayout:
        plain = super().head_layout(config, weights, prefix, index)
        return plain._replace(sinks_N=weights.exact(f"{prefix}.sinks", config.num_heads))

    def feed_forward(self, config: LlamaConfig, weights: WeightLoader, prefix: str, index: int) -> FeedForward:
        assert isinstance(config, GptOssConfig)
        mlp, D, X, F = f"{prefix}.mlp", config.hidden_size, config.num_experts, config.expert_size
        router = TopLogitsRouter(
            weights.exact(f"{mlp}.router.weight", X, D), weights.exact(f"{mlp}.router.bias", X), config.num_chosen
        )
        norm = weights.norm(f"{prefix}.post_attention_layernorm", D, config.norm_eps)
        if weights.has(f"{mlp}.experts.0.gate_proj.weight"):
            return MoE(norm, router, _separate_experts(weights, f"{mlp}.experts", config))
        gates_then_ups = torch.arange(2 * F).view(F, 2).t().flatten()  # they take turns in the checkpoint
        experts = Experts(
            _expert_weights(weights, f"{mlp}.experts.gate_up_proj", (X, 2 * F, D))[:, gates_then_ups],
            _expert_weights(weights, f"{mlp}.experts.down_proj", (X, D, F)),
            config.gate,
            weights.dense(f"{mlp}.experts.gate_up_proj_bias", X, 2 * F)[:, gates_then_ups],
            weights.dense(f"{mlp}.experts.down_proj_bias", X, D),
        )
        return MoE(norm, router, experts)


def _separate_experts(weights: WeightLoader, prefix: str, config: GptOssConfig) -> Experts:
    """Experts of a checkpoint that has the parts of each by themselves."""
    X, D, F = config.num_experts, config.hidden_size, config.expert_size
    gate_up, down = weights.experts(prefix, X, ExpertShape(D, F))
    biases = {
        part: torch.stack([weights.dense(f"{prefix}.{i}.{part}_proj.bias", size) for i in range(X)])
        for part, size in (("gate", F), ("up", F), ("down", D))
    }
    gate_up_bias = torch.cat((biases["gate"], biases["up"]), dim=1)
    return Experts(gate_up, down, config.gate, gate_up_bias, biases["down"])


def _expert_weights(weights: WeightLoader, name: str, shape: tuple[int, int, int]) -> Tensor:
    """All experts' weights [X, outputs, inputs]; in files they are MXFP4, or dense as inputs by outputs."""
    X, N, K = shape
    if not weights.has(f"{name}_blocks"):
        return weights.dense(name, X, K, N).transpose(1, 2).contiguous()
    blocks = weights.raw(f"{name}_blocks", X, N, K // BLOCK, BLOCK // 2)
    scales = weights.raw(f"{name}_scales", X, N, K // BLOCK)
    dense = torch.empty(shape, dtype=weights.form.dtype, device=weights.form.device)
    for i in range(X):
        dense[i].copy_(decode_mxfp4(blocks[i], scales[i], weights.form.dtype))
    weights.count(dense.numel(), dense.nbytes)
    return dense


class GptOssForCausalLM(LlamaForCausalLM):
    layer_class = GptOssLayer

    @classmethod
    def read_config(cls, keys: ConfigKeys, max_len: int | None) -> GptOssConfig:
        kinds = [FULL if i % 2 else SLIDING for i in range(keys.size("num_hidden_layers"))]
        windows = (read_layer_types(keys, kinds), keys.size("sliding_window", 128))
        rope = rope_values(keys)
        rope = rope if "rope_type" in rope or "type" in rope else {**ROPE, **rope}
        config = read_llama(keys, max_len, eps=1e-5, head_dim=64, windows=windows, rope=rope)
        has_bias = keys.flag("attention_bias", True)
        keys.choice("hidden_act", {"silu": None}, "silu")
        for key in ("experts_per_token", "initial_context_length"):  # other names of keys that are read
            keys.get(key)
        _check_quantization(keys)
        mixture = with_experts(
            dataclasses.replace(config, attention_bias=has_bias, output_bias=has_bias),
            keys,
            count_keys=("num_local_experts",),
            num_chosen=4,
            expert_size=config.ffn_size,
            normalises=True,
        )
        fields = {field.name: getattr(mixture, field.name) for field in dataclasses.fields(mixture)}
        gate = ClampedSwish(keys.number("swiglu_alpha", 1.702), keys.number("swiglu_limit", 7.0))
        return GptOssConfig(**fields, gate=gate)


def _check_quantization(keys: ConfigKeys) -> None:
    """The only form of quantised weights is MXFP4, in the tensors that say so by their names."""
    given = keys.child("quantization_config")
    if given is not None and given.get("quant_method") != "mxfp4":
        raise wrong("quantization_config.quant_method", given.get("quant_method"), "mxfp4")
