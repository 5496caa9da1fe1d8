"""Trinity (Arcee's AFMoE) and Laguna (Poolside): gates of what attention gives, windows in some layers, experts.

Heads are normalised, and experts chosen by sigmoids. Trinity has norms before and after attention and feed-forward
layers, and no positions where there is no window; Laguna may have another number of heads in each layer.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from octavo.models.config_keys import ConfigKeys, wrong
from octavo.models.decoder import Decoder, read_decoder
from octavo.models.model_config import SLIDING, read_layer_types
from octavo.models.moe_config import read_dense_first, read_experts
from octavo.models.olmo import ropes_by_type, with_local_rope
from octavo.models.parts import DecoderConfig, ExpertsPart, GatePart, HeadNorm, Names
from octavo.ops.moe import Routing

AFMOE = Names(
    after_attention="post_attention_layernorm", before_mlp="pre_mlp_layernorm", after_mlp="post_mlp_layernorm"
)


def with_gated_experts(
    keys: ConfigKeys,
    config: DecoderConfig,
    *,
    chosen: int,
    is_sparse: tuple[bool, ...],
    shared_size: int,
    scale_key: str,
    **names: Any,
) -> DecoderConfig:
    """With experts and a shared one; ``names`` as in ``ExpertsPart``."""
    moe = read_experts(
        keys,
        config,
        count_keys=("num_experts", "n_routed_experts", "num_local_experts"),
        num_chosen=chosen,
        expert_size=keys.size("moe_intermediate_size"),
        normalises=True,
        is_sparse=is_sparse,
        shared_size=shared_size,
    )
    routing = Routing(moe.num_chosen, True, "sigmoid", keys.number(scale_key, 1.0))
    return config.with_experts(ExpertsPart(moe=moe, routing=routing, **names))


class AfmoeForCausalLM(Decoder):
    @classmethod
    def read_config(cls, keys: ConfigKeys, max_len: int | None) -> DecoderConfig:
        every = keys.size("global_attn_every_n_layers", 4)
        types = read_layer_types(keys, lambda i: (i + 1) % every)
        spans = (types, keys.size("sliding_window", 1024))
        config = read_decoder(keys, max_len, eps=1e-5, head_dim=128, windows=spans, names=AFMOE, mlp_bias=False)
        keys.choice("score_func", {"sigmoid": None}, "sigmoid")
        ones = dict.fromkeys(("n_group", "topk_group", "num_expert_groups", "num_limited_groups"), (1,))
        keys.must_be({"route_norm": (True,), **ones})
        keys.pass_over("load_balance_coeff", "use_grouped_mm")
        config = with_gated_experts(
            keys,
            config,
            chosen=6,
            is_sparse=read_dense_first(keys, config.num_layers, keys.size("num_dense_layers", 1, low=0)),
            shared_size=keys.size("moe_intermediate_size") * keys.size("num_shared_experts", 2, low=0),
            scale_key="route_scale",
            router="mlp.router.gate",
            correction="mlp.expert_bias",
        )
        config = config.with_attention(
            head_norm=HeadNorm(),
            gate=GatePart("self_attn.gate_proj"),
            rope=[0 if kind == SLIDING else None for kind in types],
        )
        scale = config.hidden_size**0.5 if keys.flag("mup_enabled") else 1.0
        return dataclasses.replace(config, embedding_scale=scale)


def with_heads_of_layers(config: DecoderConfig, counts: list[int], key: str) -> DecoderConfig:
    """With another number of query heads in each layer; ``key`` names where they are from in errors."""
    for count in counts:
        if count % config.num_kv_heads:
            raise wrong(key, count, f"a multiple of num_key_value_heads, {config.num_kv_heads}")
    return dataclasses.replace(config.with_attention(num_heads=counts), num_heads=max(counts))


class LagunaForCausalLM(Decoder):
    @classmethod
    def read_config(cls, keys: ConfigKeys, max_len: int | None) -> DecoderConfig:
        types, (full, local) = read_layer_types(keys), ropes_by_type(keys, theta=500_000.0, local_theta=10_000.0)
        spans = (types, keys.size("sliding_window", 512))
        rotary = 0.5 if keys.get("rope_parameters") is None else 1.0
        config = read_decoder(
            keys, max_len, head_dim=128, rotary=rotary, rope=full, windows=spans, has_bias=False, mlp_bias=False
        )
        config = with_local_rope(config, local, types, max_len, rotary=1.0)
        keys.must_be({"moe_apply_router_weight_on_input": (False,), "moe_router_logit_softcapping": (0,)})
        config = with_gated_experts(
            keys,
            config,
            chosen=8,
            is_sparse=read_dense_first(keys, config.num_layers, 1),
            shared_size=keys.size("shared_expert_intermediate_size", 512),
            scale_key="moe_routed_scaling_factor",
            correction="mlp.experts.e_score_correction_bias",
            shared=("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"),
            shared_down="mlp.shared_expert.down_proj",
        )
        gating = keys.get("gating", True)
        if gating not in (True, "per-head", "per-element"):
            raise wrong("gating", gating, "true, per-head or per-element")
        gate = GatePart("self_attn.g_proj", "softplus", is_of_head=gating != "per-element")
        key = "num_attention_heads_per_layer"
        counts = keys.get(key, [config.num_heads] * config.num_layers)
        if not isinstance(counts, list) or len(counts) != config.num_layers or not all(type(n) is int for n in counts):
            raise wrong(key, counts, f"a list of {config.num_layers} whole numbers")
        return with_heads_of_layers(config.with_attention(head_norm=HeadNorm(), gate=gate), counts, key)
