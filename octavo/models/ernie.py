"""ERNIE 4.5 (Baidu), dense and with experts: adjacent rotated pairs, and a softmax over experts with a correction."""

from __future__ import annotations

import dataclasses

from octavo.models.config_keys import ConfigKeys
from octavo.models.decoder import Decoder, read_decoder
from octavo.models.moe_config import read_experts
from octavo.models.parts import DecoderConfig, ExpertsPart
from octavo.ops.moe import Routing


def read_ernie(keys: ConfigKeys, max_len: int | None, head_dim: int | None) -> DecoderConfig:
    """Read the keys of both families."""
    has_bias = keys.flag("use_bias")
    config = read_decoder(
        keys, max_len, tied=True, eps=1e-5, head_dim=head_dim, theta=5e5, has_bias=has_bias, mlp_bias=has_bias
    )
    return config.with_attention(is_adjacent=True)


class Ernie4_5ForCausalLM(Decoder):
    @classmethod
    def read_config(cls, keys: ConfigKeys, max_len: int | None) -> DecoderConfig:
        return read_ernie(keys, max_len, head_dim=128)


class Ernie4_5_MoeForCausalLM(Decoder):
    @classmethod
    def read_config(cls, keys: ConfigKeys, max_len: int | None) -> DecoderConfig:
        config = read_ernie(keys, max_len, head_dim=None)
        expert_size, start = keys.size("moe_intermediate_size", 1536), keys.size("moe_layer_start_index", 1, low=0)
        end, step = keys.size("moe_layer_end_index", -1, low=-1), keys.size("moe_layer_interval", 1)
        last = config.num_layers - 1 if end == -1 else end
        keys.get("moe_norm_min")  # a bound of a sum of the largest of some shares that sum to one
        moe = read_experts(
            keys,
            config,
            count_keys=("moe_num_experts", "num_experts"),
            num_chosen=6,
            chosen_key="moe_k",
            expert_size=expert_size,
            normalises=True,
            is_sparse=tuple((i + 1) % step == 0 and start <= i <= last for i in range(config.num_layers)),
            shared_size=expert_size * keys.size("moe_num_shared_experts", 2, low=0),
        )
        part = ExpertsPart(
            moe=moe,
            routing=Routing(moe.num_chosen, normalises=True),
            correction="mlp.moe_statics.e_score_correction_bias",
            shared_has_bias=keys.flag("use_bias"),
        )
        return dataclasses.replace(config.with_experts(part), has_head_bias=keys.flag("use_bias"))
