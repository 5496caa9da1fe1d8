"""EXAONE 4 (arXiv 2507.11407) and K-EXAONE, which has experts.

Norms of each head, windows in three of four layers and no positions in the fourth. EXAONE 4 normalises what attention
and the feed-forward layer give, K-EXAONE what they get.
"""

from __future__ import annotations

from octavo.models.config_keys import ConfigKeys, wrong
from octavo.models.decoder import Decoder, read_decoder
from octavo.models.model_config import SLIDING, read_layer_types
from octavo.models.moe_config import read_dense_first, read_experts, read_sigmoid_routing
from octavo.models.olmo import AFTER
from octavo.models.parts import DecoderConfig, ExpertsPart, HeadNorm, Names


def read_exaone(keys: ConfigKeys, max_len: int | None, names: Names) -> DecoderConfig:
    """Read the keys of both families."""
    has_window = keys.get("sliding_window", 4096 if not keys.has("sliding_window") else None) is not None
    window = keys.size("sliding_window", 4096) if has_window else None
    pattern, last = keys.get("sliding_window_pattern", 4), keys.size("num_hidden_layers") - 1
    if isinstance(pattern, str) and set(pattern) <= {"L", "G"} and pattern:
        types = read_layer_types(keys, lambda i: i < last and pattern[i % len(pattern)] == "L")
    elif isinstance(pattern, int) and pattern >= 0:
        types = read_layer_types(keys, lambda i: has_window and pattern and (i + 1) % pattern)
    else:
        raise wrong("sliding_window_pattern", pattern, "a whole number, or letters L and G")
    config = read_decoder(keys, max_len, eps=1e-5, windows=(types, window), names=names, has_bias=False, mlp_bias=False)
    ropes = [0 if window is None or kind == SLIDING else None for kind in types]
    return config.with_attention(head_norm=HeadNorm(), rope=ropes)


class Exaone4ForCausalLM(Decoder):
    @classmethod
    def read_config(cls, keys: ConfigKeys, max_len: int | None) -> DecoderConfig:
        return read_exaone(keys, max_len, AFTER)


class ExaoneMoeForCausalLM(Decoder):
    @classmethod
    def read_config(cls, keys: ConfigKeys, max_len: int | None) -> DecoderConfig:
        config = read_exaone(keys, max_len, Names())
        first = keys.size("first_k_dense_replace", 1, low=0)
        expert_size = keys.size("moe_intermediate_size", 1024)
        moe = read_experts(
            keys,
            config,
            count_keys=("num_experts", "num_local_experts"),
            num_chosen=8,
            expert_size=expert_size,
            normalises=keys.flag("norm_topk_prob", True),
            is_sparse=read_dense_first(keys, config.num_layers, first),
            shared_size=expert_size * keys.size("num_shared_experts", 1, low=0),
        )
        routing = read_sigmoid_routing(keys, moe, scale=2.5)
        part = ExpertsPart(moe=moe, routing=routing, correction="mlp.e_score_correction_bias")
        return config.with_experts(part)
