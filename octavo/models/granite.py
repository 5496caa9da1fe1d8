"""Granite (IBM): Llama with factors of embeddings, attention, residuals and logits; with experts, windows or neither.
HyperCLOVA X SEED (Naver) is like it.

The variants with windows have attention sinks, and a rotary base for each layer, 0 for layers without positions.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from octavo.models.config_keys import ConfigKeys, wrong
from octavo.models.decoder import Decoder, read_decoder
from octavo.models.model_config import read_layer_types
from octavo.models.moe_config import read_experts
from octavo.models.parts import DecoderConfig, ExpertsPart, Names
from octavo.models.rope_keys import rope_values
from octavo.ops.moe import Routing


def with_factors(keys: ConfigKeys, config: DecoderConfig) -> DecoderConfig:
    """With Granite's four factors."""
    config = dataclasses.replace(
        config,
        embedding_scale=keys.number("embedding_multiplier", 1.0),
        residual_scale=keys.number("residual_multiplier", 1.0),
        logit_scale=1 / keys.number("logits_scaling", 1.0),
    )
    return config.with_attention(scale=keys.number("attention_multiplier", 1.0))


def with_experts(keys: ConfigKeys, config: DecoderConfig, shared_size: int, **names: Any) -> DecoderConfig:
    """With experts in every layer, and a shared one of ``shared_size``, 0: none; ``names``: other ones in
    ``ExpertsPart``."""
    moe = read_experts(
        keys, config, count_keys=("num_local_experts",), num_chosen=2, normalises=True, shared_size=shared_size
    )
    part = ExpertsPart(
        moe=moe,
        routing=Routing(moe.num_chosen, normalises=True),
        router="block_sparse_moe.router.layer",
        experts="block_sparse_moe",
        stacked=("input_linear.weight", "output_linear.weight"),
        shared=("shared_mlp.input_linear",),
        shared_down="shared_mlp.output_linear",
    )
    if keys.flag("has_separate_gates"):  # as in GGUF files
        gates = ("shared_mlp.gate_proj", "shared_mlp.up_proj")
        part = dataclasses.replace(part, experts="block_sparse_moe.experts", stacked=None, shared=gates)
    return config.with_experts(dataclasses.replace(part, **names))


def with_windows(keys: ConfigKeys, max_len: int | None) -> DecoderConfig:
    """Layers with windows, sinks and rotary bases of their own."""
    types = read_layer_types(keys, lambda i: i % 4)
    given, thetas = rope_values(keys), keys.get("layer_rope_theta")
    config = read_decoder(
        keys, max_len, tied=True, eps=1e-5, windows=(types, keys.size("sliding_window", 128)), rope=given
    )
    if thetas is None:
        return config.with_attention(has_sinks=True)
    if not isinstance(thetas, list | tuple) or len(thetas) != len(types):
        raise wrong("layer_rope_theta", thetas, f"a list of {len(types)} numbers")
    width, bases = config.ropes[0][1], sorted({theta for theta in thetas if theta})
    ropes = tuple(config.rope({**given, "rope_theta": theta}, max_len, width) for theta in bases)
    config = dataclasses.replace(config, ropes=ropes)
    return config.with_attention(has_sinks=True, rope=[bases.index(theta) if theta else None for theta in thetas])


class GraniteForCausalLM(Decoder):
    @classmethod
    def read_config(cls, keys: ConfigKeys, max_len: int | None) -> DecoderConfig:
        return with_factors(keys, read_decoder(keys, max_len))


class GraniteSWAForCausalLM(Decoder):
    @classmethod
    def read_config(cls, keys: ConfigKeys, max_len: int | None) -> DecoderConfig:
        return with_factors(keys, with_windows(keys, max_len))


class GraniteMoeForCausalLM(Decoder):
    @classmethod
    def read_config(cls, keys: ConfigKeys, max_len: int | None) -> DecoderConfig:
        return with_experts(keys, with_factors(keys, read_decoder(keys, max_len, mlp_bias=False)), shared_size=0)


class GraniteMoeSharedForCausalLM(Decoder):
    @classmethod
    def read_config(cls, keys: ConfigKeys, max_len: int | None) -> DecoderConfig:
        shared_size = keys.size("shared_intermediate_size", 0, low=0)
        return with_experts(keys, with_factors(keys, read_decoder(keys, max_len, mlp_bias=False)), shared_size)


class GraniteMoeSWAForCausalLM(Decoder):
    @classmethod
    def read_config(cls, keys: ConfigKeys, max_len: int | None) -> DecoderConfig:
        config = with_factors(keys, with_windows(keys, max_len))
        shared_size = keys.size("shared_intermediate_size", 0, low=0)
        names = {"router": "block_sparse_moe.router", "experts": "block_sparse_moe.experts"}
        return with_experts(keys, config, shared_size, **names, stacked=("gate_up_proj", "down_proj"))


class HyperCLOVAXForCausalLM(Decoder):
    """Logits are multiplied by their factor, and layers may have norms of what they add."""

    @classmethod
    def read_config(cls, keys: ConfigKeys, max_len: int | None) -> DecoderConfig:
        names = Names(after_attention="post_norm1", after_mlp="post_norm2")
        config = read_decoder(keys, max_len, names=names if keys.flag("use_post_norm", True) else None)
        scale = keys.number("attention_multiplier", config.head_dim**-0.5)
        logit_scale = keys.number("logits_scaling", 1.0)
        return dataclasses.replace(with_factors(keys, config), logit_scale=logit_scale).with_attention(scale=scale)
