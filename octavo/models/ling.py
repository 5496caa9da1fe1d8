"""Ling and Ring 1 and 2 (Ant Group's BailingMoE, arXiv 2510.22115): queries, keys and values fused, all but the first
layers with experts. The second version normalises heads, and chooses experts by sigmoids within groups.
"""

from __future__ import annotations

from octavo.models.config_keys import ConfigKeys
from octavo.models.decoder import Decoder, read_decoder
from octavo.models.moe import read_dense_first, read_experts, read_sigmoid_routing
from octavo.models.parts import DecoderConfig, ExpertsPart, HeadNorm, Names
from octavo.ops.moe import Routing

NAMES = Names(
    embedding="model.word_embeddings",
    queries=("attention.query_key_value",),
    output="attention.dense",
    head_norms=("attention.query_layernorm", "attention.key_layernorm"),
)
UNUSED = (
    *("embedding_dropout", "max_window_layers", "mtp_loss_scaling_factor", "norm_softmax", "num_mtp_layers"),
    *("num_nextn_predict_layers", "output_dropout", "router_dtype", "router_type", "sliding_window"),
)
"""Keys of training, and those of windows, which no layer has."""


class BailingMoeV2ForCausalLM(Decoder):
    @classmethod
    def read_config(cls, keys: ConfigKeys, max_len: int | None) -> DecoderConfig:
        keys.must_be({"norm_head": (False,), "use_rmsnorm": (True,)})
        keys.pass_over(*UNUSED)
        has_bias = keys.flag("use_bias")
        has_query_bias = keys.flag("use_qkv_bias") or has_bias
        config = read_decoder(keys, max_len, has_bias=has_query_bias, mlp_bias=has_bias, names=NAMES)
        expert_size, first = keys.size("moe_intermediate_size"), keys.size("first_k_dense_replace", 0, low=0)
        shared_size = keys.size("moe_shared_expert_intermediate_size", expert_size)
        moe = read_experts(
            keys,
            config,
            count_keys=("num_experts", "n_routed_experts"),
            num_chosen=8,
            expert_size=expert_size,
            normalises=keys.flag("norm_topk_prob", True),
            is_sparse=read_dense_first(keys, config.num_layers, first),
            shared_size=shared_size * keys.size("num_shared_experts", 0, low=0),
        )
        is_sigmoid = keys.choice("score_function", {"softmax": False, "sigmoid": True}, "softmax")
        part = ExpertsPart(
            moe=moe,
            routing=read_sigmoid_routing(keys, moe) if is_sigmoid else Routing(moe.num_chosen, moe.normalises),
            correction="mlp.gate.expert_bias" if keys.flag("moe_router_enable_expert_bias") else None,
            shared_has_bias=has_bias,
        )
        norm = HeadNorm() if keys.flag("use_qk_norm") else None
        return config.with_experts(part).with_attention(head_norm=norm, has_output_bias=has_bias)
