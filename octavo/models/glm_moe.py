"""GLM-4.5 to 4.7 (arXiv 2508.06471), Solar Open, dots.llm1 (arXiv 2506.05767), MiniMax-M2: experts chosen by sigmoids.

All but MiniMax-M2 have shared experts, and all but it and Solar Open dense first layers.
"""

from __future__ import annotations

from typing import Any

from octavo.models.config_keys import ConfigKeys
from octavo.models.decoder import Decoder, read_decoder
from octavo.models.deepseek import DeepseekV3ForCausalLM
from octavo.models.mixtral import EXPERTS
from octavo.models.model_config import read_layer_types
from octavo.models.moe_config import read_dense_first, read_experts, read_sigmoid_routing
from octavo.models.parts import DecoderConfig, ExpertsPart, HeadNorm
from octavo.models.rope_keys import rope_values
from octavo.ops.moe import Routing

CORRECTION = "mlp.gate.e_score_correction_bias"


def with_sigmoid_experts(
    keys: ConfigKeys, config: DecoderConfig, *, first: int, chosen: int, shared: int, normalises: bool
) -> DecoderConfig:
    """With DeepSeek-V3's experts and router; the numbers are a family's defaults."""
    expert_size = keys.size("moe_intermediate_size", 1408)
    first = keys.size("first_k_dense_replace", first, low=0)
    moe = read_experts(
        keys,
        config,
        count_keys=("n_routed_experts", "num_local_experts"),
        num_chosen=chosen,
        expert_size=expert_size,
        normalises=keys.flag("norm_topk_prob", normalises),
        is_sparse=read_dense_first(keys, config.num_layers, first),
        shared_size=expert_size * keys.size("n_shared_experts", shared, low=0),
    )
    keys.pass_over("num_nextn_predict_layers", "num_mtp_layers")
    part = ExpertsPart(moe=moe, routing=read_sigmoid_routing(keys, moe), correction=CORRECTION)
    return config.with_experts(part)


class Glm4MoeForCausalLM(Decoder):
    @classmethod
    def read_config(cls, keys: ConfigKeys, max_len: int | None) -> DecoderConfig:
        config = read_decoder(keys, max_len, eps=1e-5, rotary=0.5, mlp_bias=False)
        config = with_sigmoid_experts(keys, config, first=1, chosen=8, shared=1, normalises=True)
        norm = HeadNorm() if keys.flag("use_qk_norm") else None
        return config.with_attention(head_norm=norm, has_output_bias=False)


class SolarOpenForCausalLM(Decoder):
    @classmethod
    def read_config(cls, keys: ConfigKeys, max_len: int | None) -> DecoderConfig:
        config = read_decoder(keys, max_len, eps=1e-5, head_dim=128, rotary=1.0, theta=1e6, ffn_size=1, mlp_bias=False)
        config = with_sigmoid_experts(keys, config, first=0, chosen=8, shared=1, normalises=True)
        return config.with_attention(has_output_bias=False)


class Glm4MoeLiteForCausalLM(DeepseekV3ForCausalLM):
    """GLM-4.7-Flash: DeepSeek-V3 with other defaults."""

    @classmethod
    def read_config(cls, keys: ConfigKeys, max_len: int | None) -> DecoderConfig:
        defaults: dict[str, Any] = {"first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 4}
        defaults |= {"routed_scaling_factor": 1.8, "q_lora_rank": 768, "v_head_dim": 256}
        given = {key: value for key, value in keys.values.items() if value is not None}
        return super().read_config(keys.over({**defaults, **given}), max_len)


class Dots1ForCausalLM(Decoder):
    @classmethod
    def read_config(cls, keys: ConfigKeys, max_len: int | None) -> DecoderConfig:
        first = keys.size("max_window_layers", 62, low=0)
        window = keys.get("sliding_window", None if keys.has("sliding_window") else 4096)
        types = read_layer_types(keys, lambda i: window is not None and i >= first)
        spans = (types, None if window is None else keys.size("sliding_window", 4096))
        config = read_decoder(keys, max_len, windows=spans, mlp_bias=False)
        config = with_sigmoid_experts(keys, config, first=0, chosen=6, shared=0, normalises=False)
        return config.with_attention(head_norm=HeadNorm())


class MiniMaxM2ForCausalLM(Decoder):
    @classmethod
    def read_config(cls, keys: ConfigKeys, max_len: int | None) -> DecoderConfig:
        given, width = rope_values(keys), keys.get("rotary_dim")
        if width is not None and "partial_rotary_factor" not in given:
            given["partial_rotary_factor"] = keys.size("rotary_dim") / keys.size("head_dim", 128)
        config = read_decoder(keys, max_len, head_dim=128, rotary=1.0, theta=5e6, rope=given, mlp_bias=False)
        moe = read_experts(keys, config, count_keys=("num_local_experts", "num_experts"), num_chosen=8, normalises=True)
        keys.choice("scoring_func", {"sigmoid": None}, "sigmoid")
        keys.pass_over("use_routing_bias", "num_mtp_modules", "mtp_transformer_layers", "use_mtp", "use_qk_norm")
        keys.choice("qk_norm_type", {"per_layer": None}, "per_layer")
        part = ExpertsPart(
            moe=moe,
            routing=Routing(moe.num_chosen, True, "sigmoid"),
            correction="block_sparse_moe.e_score_correction_bias",
            **EXPERTS,
        )
        return config.with_experts(part).with_attention(head_norm=HeadNorm("all"))
