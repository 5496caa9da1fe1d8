"""Qwen2-MoE (arXiv 2407.10671) and Qwen3-MoE (arXiv 2505.09388): Qwen2 and Qwen3 with experts.

Qwen2-MoE also has a gated shared expert, which all tokens use.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from octavo.layers.moe import ExpertRouter, MoE, SharedExpert
from octavo.models.config_keys import ConfigKeys, wrong
from octavo.models.llama import FeedForward, LlamaConfig, LlamaForCausalLM, LlamaLayer
from octavo.models.loader import ExpertShape, WeightLoader
from octavo.models.moe import MoESettings, read_experts
from octavo.models.qwen2 import read_qwen
from octavo.models.qwen3 import Qwen3Layer
from octavo.ops.moe import Routing


def qwen_mixture(
    layer: LlamaLayer, config: LlamaConfig, moe: MoESettings, weights: WeightLoader, prefix: str
) -> FeedForward:
    """The experts of a layer, and the shared expert if there is one."""
    mlp, D, X = f"{prefix}.mlp", config.hidden_size, moe.num_experts
    norm = weights.norm(f"{prefix}.post_attention_layernorm", D, config.norm_eps, config.norm_offset)
    router = ExpertRouter(norm, weights.router(f"{mlp}.gate", X, D), Routing(moe.num_chosen, moe.normalises))
    shape = ExpertShape(X, D, moe.expert_size, moe.activation)
    if weights.tensors.has(f"{mlp}.experts.gate_up_proj"):  # in checkpoints of Qwen3-VL
        experts = weights.stacked_experts(f"{mlp}.experts", shape, np.arange(2 * moe.expert_size))
    else:
        experts = weights.experts(f"{mlp}.experts", shape)
    shared = _shared_expert(config, moe.shared_size, weights, mlp) if moe.shared_size else None
    return MoE(router, experts, shared, weights.collective)


def _shared_expert(config: LlamaConfig, size: int, weights: WeightLoader, prefix: str) -> SharedExpert:
    """The shared expert, which all tokens use."""
    D, name = config.hidden_size, f"{prefix}.shared_expert"
    return SharedExpert(
        weights.gate_up([f"{name}.gate_proj", f"{name}.up_proj"], size, D),
        weights.partial_row(f"{name}.down_proj", D, size),
        config.activation,
        weights.replicated(f"{name}_gate", 1, D),
    )


class Qwen2MoeLayer(LlamaLayer):
    mixture = qwen_mixture


class Qwen3MoeLayer(Qwen3Layer):
    mixture = qwen_mixture


def _sparse_layers(keys: ConfigKeys, num_layers: int) -> tuple[bool, ...]:
    """Whether each layer has experts: every ``decoder_sparse_step``-th, except those in ``mlp_only_layers``."""
    step, dense = keys.size("decoder_sparse_step", 1), keys.get("mlp_only_layers", [])
    if not isinstance(dense, list | tuple) or not all(type(index) is int for index in dense):
        raise wrong("mlp_only_layers", dense, "a list of layer numbers")
    return tuple(i not in dense and (i + 1) % step == 0 for i in range(num_layers))


def read_qwen_experts(
    keys: ConfigKeys, config: LlamaConfig, chosen: int, normalises: bool = False, shared_size: int = 0
) -> MoESettings:
    """Read the experts; defaults are the family's, 0 for one without a shared expert."""
    return read_experts(
        keys,
        config.num_layers,
        config.ffn_size,
        config.activation,
        count_keys=("num_experts", "num_local_experts"),
        num_chosen=chosen,
        expert_size=keys.size("moe_intermediate_size"),
        normalises=keys.flag("norm_topk_prob", normalises),
        is_sparse=_sparse_layers(keys, config.num_layers),
        shared_size=keys.size("shared_expert_intermediate_size", shared_size) if shared_size else 0,
    )


def _read(
    keys: ConfigKeys, max_len: int | None, slides: Callable[[int, int], bool], chosen: int, shared_size: int = 0
) -> LlamaConfig:
    config = read_qwen(keys, max_len, slides)
    moe = read_qwen_experts(keys, config, chosen, shared_size=shared_size)
    return dataclasses.replace(config, moe=moe, ffn_size=moe.widest)


class Qwen2MoeForCausalLM(LlamaForCausalLM):
    layer_class = Qwen2MoeLayer

    @classmethod
    def read_config(cls, keys: ConfigKeys, max_len: int | None) -> LlamaConfig:
        config = _read(keys, max_len, lambda i, first: i % 2 == 0 and i < first, 4, shared_size=5632)
        return dataclasses.replace(config, attention_bias=keys.flag("qkv_bias", True), output_bias=False)


class Qwen3MoeForCausalLM(LlamaForCausalLM):
    layer_class = Qwen3MoeLayer

    @classmethod
    def read_config(cls, keys: ConfigKeys, max_len: int | None) -> LlamaConfig:
        return _read(keys, max_len, lambda i, first: True, 8)
