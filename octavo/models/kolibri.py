"""Kolibri 1 (Aleph Alpha): many narrow experts and a shared one in all layers, windows in four of five.

Heads are normalised, and so is what attention and experts get and give. Layers without a window have no positions. The
correction of the routing is added to logits, whose sigmoids are the shares.
"""

from __future__ import annotations

from octavo.models.config_keys import ConfigKeys
from octavo.models.decoder import Decoder, read_decoder
from octavo.models.model_config import SLIDING, read_layer_types
from octavo.models.moe_config import read_experts
from octavo.models.parts import DecoderConfig, ExpertsPart, HeadNorm, Names
from octavo.ops.moe import Routing

NAMES = Names(after_attention="post_attn_norm", after_mlp="post_ffn_norm")


class Kolibri1ForCausalLM(Decoder):
    @classmethod
    def read_config(cls, keys: ConfigKeys, max_len: int | None) -> DecoderConfig:
        types = read_layer_types(keys, lambda i: (i + 1) % 5)
        is_null = keys.has("sliding_window") and keys.get("sliding_window") is None
        window = None if is_null else keys.size("sliding_window", 513)
        expert_size = keys.size("moe_intermediate_size", 512)
        config = read_decoder(
            keys, max_len, head_dim=128, ffn_size=expert_size, windows=(types, window), names=NAMES, has_bias=False,
            mlp_bias=False,
        )  # fmt: skip
        moe = read_experts(
            keys,
            config,
            count_keys=("num_experts", "num_local_experts"),
            num_chosen=6,
            expert_size=expert_size,
            normalises=keys.flag("norm_topk_prob"),
            shared_size=keys.size("shared_expert_intermediate_size", 512),
        )
        routing = Routing(moe.num_chosen, moe.normalises, "sigmoid", corrects_logits=True)
        part = ExpertsPart(moe=moe, routing=routing, correction="moe.router.expert_bias")
        ropes = [0 if window is None or kind == SLIDING else None for kind in types]
        return config.with_experts(part).with_attention(head_norm=HeadNorm(), rope=ropes)
