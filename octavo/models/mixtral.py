"""Mixtral (arXiv 2401.04088): Mistral with eight experts for every feed-forward layer, two of them for each token.

Also what other mixtures of experts share: their part of the configuration.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from octavo.layers.moe import MoE, SoftmaxRouter
from octavo.models.keys import ConfigKeys, wrong
from octavo.models.llama import FeedForward, LlamaConfig, LlamaForCausalLM, LlamaLayer
from octavo.models.loader import ExpertShape, WeightLoader
from octavo.models.mistral import read_mistral


@dataclass(frozen=True, kw_only=True)
class MoEConfig(LlamaConfig):
    """``ffn_size`` is that of all experts together that a token passes through."""

    num_experts: int
    num_chosen: int
    """Experts for each token."""
    expert_size: int
    """Width of one expert."""
    dense_size: int
    """Width of a feed-forward layer without experts."""
    is_sparse: tuple[bool, ...]
    """Whether each layer has experts."""
    normalises: bool
    """Whether the shares of a token's experts are made to sum to 1."""
    shared_size: int = 0
    """Width of what all tokens pass through beside the experts; 0: there is no such thing."""


def with_experts(
    config: LlamaConfig,
    keys: ConfigKeys,
    *,
    count_keys: tuple[str, ...],
    num_chosen: int,
    expert_size: int,
    normalises: bool,
    is_sparse: tuple[bool, ...] = (),
    shared_size: int = 0,
) -> MoEConfig:
    """The configuration with experts, in every layer unless ``is_sparse`` says where; defaults are the family's.

    ``count_keys`` are the names that the number of experts may have.
    """
    count_key = next((key for key in count_keys if keys.get(key) is not None), count_keys[0])
    num_experts, chosen = keys.size(count_key), keys.size("num_experts_per_tok", num_chosen)
    if chosen > num_experts:
        raise wrong("num_experts_per_tok", chosen, f"at most {count_key}, {num_experts}")
    fields = {field.name: getattr(config, field.name) for field in dataclasses.fields(LlamaConfig)}
    widest = chosen * expert_size + shared_size
    return MoEConfig(
        **{**fields, "ffn_size": max(widest, config.ffn_size)},
        num_experts=num_experts,
        num_chosen=chosen,
        expert_size=expert_size,
        dense_size=config.ffn_size,
        is_sparse=is_sparse or (True,) * config.num_layers,
        normalises=normalises,
        shared_size=shared_size,
    )


class MixtralLayer(LlamaLayer):
    def feed_forward(self, config: LlamaConfig, weights: WeightLoader, prefix: str, index: int) -> FeedForward:
        assert isinstance(config, MoEConfig)
        moe, D = f"{prefix}.block_sparse_moe", config.hidden_size
        X, F = config.num_experts, config.expert_size
        shape = ExpertShape(X, D, F, config.activation, gate="w1", up="w3", down="w2")
        router = SoftmaxRouter(weights.router(f"{moe}.gate", X, D), config.num_chosen, config.normalises)
        norm = weights.norm(f"{prefix}.post_attention_layernorm", D, config.norm_eps)
        return MoE(norm, router, weights.experts(f"{moe}.experts", shape))


class MixtralForCausalLM(LlamaForCausalLM):
    layer_class = MixtralLayer

    @classmethod
    def read_config(cls, keys: ConfigKeys, max_len: int | None) -> MoEConfig:
        config = read_mistral(keys, max_len, eps=1e-5)
        return with_experts(
            config,
            keys,
            count_keys=("num_local_experts",),
            num_chosen=2,
            expert_size=config.ffn_size,
            normalises=True,
        )
