"""Qwen2-MoE (arXiv 2407.10671), Qwen3-MoE (arXiv 2505.09388), Mellum 2 (JetBrains) and Flint: Qwen2 and 3 with experts.

Qwen2-MoE also has a gated shared expert, which all tokens use; Mellum 2 is Qwen3-MoE with windows in some layers, which
have a rotary embedding of their own. Flint has windows, no positions where there is none, attention sinks, and experts
chosen by sigmoids beside a shared one.
"""

from __future__ import annotations

from octavo.models.config_keys import ConfigKeys, wrong
from octavo.models.decoder import Decoder, read_decoder
from octavo.models.model_config import SLIDING, read_layer_types
from octavo.models.moe_config import read_dense_first, read_experts
from octavo.models.olmo import ropes_by_type, with_local_rope
from octavo.models.parts import C, DecoderConfig, ExpertsPart, HeadNorm, Names
from octavo.models.qwen2 import read_qwen
from octavo.ops.moe import Routing


def _sparse_layers(keys: ConfigKeys, num_layers: int) -> tuple[bool, ...]:
    """Whether each layer has experts: by ``mlp_layer_types``, or every ``decoder_sparse_step``-th, except those in
    ``mlp_only_layers``."""
    if keys.get("mlp_layer_types") is not None:
        return read_dense_first(keys, num_layers, 0)
    step, dense = keys.size("decoder_sparse_step", 1), keys.get("mlp_only_layers", [])
    if not isinstance(dense, list | tuple) or not all(type(index) is int for index in dense):
        raise wrong("mlp_only_layers", dense, "a list of layer numbers")
    return tuple(i not in dense and (i + 1) % step == 0 for i in range(num_layers))


def with_qwen_experts(
    keys: ConfigKeys, config: C, chosen: int, normalises: bool = False, shared_size: int = 0, is_sigmoid: bool = False
) -> C:
    """With experts; defaults are the family's, 0 for one without a shared expert. A shared one has a gate unless the
    others are chosen by sigmoids."""
    moe = read_experts(
        keys,
        config,
        count_keys=("num_experts", "num_local_experts"),
        num_chosen=chosen,
        expert_size=keys.size("moe_intermediate_size"),
        normalises=keys.flag("norm_topk_prob", normalises),
        is_sparse=_sparse_layers(keys, config.num_layers),
        shared_size=keys.size("shared_expert_intermediate_size", shared_size) if shared_size else 0,
    )
    part = ExpertsPart(
        moe=moe,
        routing=Routing(moe.num_chosen, moe.normalises, "sigmoid" if is_sigmoid else "softmax"),
        stacked=("gate_up_proj", "down_proj"),  # in checkpoints of Qwen3-VL
        shared=("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"),
        shared_down="mlp.shared_expert.down_proj",
        shared_gate=None if is_sigmoid else "mlp.shared_expert_gate",
    )
    return config.with_experts(part)


class Qwen2MoeForCausalLM(Decoder):
    @classmethod
    def read_config(cls, keys: ConfigKeys, max_len: int | None) -> DecoderConfig:
        config = read_qwen(keys, max_len, lambda i, first: i % 2 == 0 and i < first)
        config = config.with_attention(has_bias=keys.flag("qkv_bias", True), has_output_bias=False)
        return with_qwen_experts(keys, config, 4, shared_size=5632)


class Qwen3MoeForCausalLM(Decoder):
    @classmethod
    def read_config(cls, keys: ConfigKeys, max_len: int | None) -> DecoderConfig:
        config = read_qwen(keys, max_len, lambda i, first: True)
        return with_qwen_experts(keys, config.with_attention(head_norm=HeadNorm()), 8)


class MellumForCausalLM(Decoder):
    @classmethod
    def read_config(cls, keys: ConfigKeys, max_len: int | None) -> DecoderConfig:
        types, (full, local) = read_layer_types(keys), ropes_by_type(keys, theta=500_000.0, local_theta=10_000.0)
        spans = (types, keys.size("sliding_window", 1024))
        config = read_decoder(keys, max_len, head_dim=128, rotary=1.0, rope=full, windows=spans, mlp_bias=False)
        config = with_local_rope(config, local, types, max_len, 1.0).with_attention(head_norm=HeadNorm())
        keys.pass_over("num_mtp_layers", "num_nextn_predict_layers", "mtp_layer_types", "mtp_mlp_layer_types")
        return with_qwen_experts(keys, config, 8, normalises=True)


class FlintForCausalLM(Decoder):
    @classmethod
    def read_config(cls, keys: ConfigKeys, max_len: int | None) -> DecoderConfig:
        last = keys.size("num_hidden_layers") - 1
        types = read_layer_types(keys, lambda i: 2 <= i < last and i % 4 != 1)
        spans = (types, keys.size("sliding_window", 513))
        names = Names(sinks="self_attn.softmax_offset")
        config = read_decoder(keys, max_len, head_dim=128, windows=spans, mlp_bias=False, names=names)
        if keys.get("mlp_only_layers") is None:
            keys = keys.over({**keys.values, "mlp_only_layers": [0, 1]})
        config = config.with_attention(
            head_norm=HeadNorm(), has_sinks=True, rope=[0 if kind == SLIDING else None for kind in types]
        )
        return with_qwen_experts(keys, config, 6, normalises=True, shared_size=1024, is_sigmoid=True)
