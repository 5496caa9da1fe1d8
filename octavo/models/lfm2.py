"""LFM2 and LFM3 (Liquid AI): gated short convolutions, and attention in every few layers; LFM2-MoE has experts.

LFM3 has windows in some of the attention layers, gates of heads, and norms of what each part gives.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from octavo.layers.recurrent import ShortConv
from octavo.models.config_keys import ConfigKeys
from octavo.models.decoder import NO_WINDOWS, Decoder, read_decoder
from octavo.models.hybrid import HybridLayer, Recurrence, layer_kinds
from octavo.models.layer_cache import conv_state, state_layer
from octavo.models.linear_parts import MatrixRows
from octavo.models.loader import WeightLoader
from octavo.models.model_config import FULL, SLIDING
from octavo.models.moe_config import read_experts
from octavo.models.olmo import ropes_by_type
from octavo.models.parts import LLAMA, DecoderConfig, ExpertsPart, GatePart, HeadNorm, MLPPart, Names
from octavo.ops.moe import Routing
from octavo.quant.stored.shard import Section

CONV = "conv"
NAMES = Names(
    norm="model.embedding_norm",
    output="self_attn.out_proj",
    head_norms=("self_attn.q_layernorm", "self_attn.k_layernorm"),
    before_attention="operator_norm",
    before_mlp="ffn_norm",
    ups=("feed_forward.w1", "feed_forward.w3"),
    down="feed_forward.w2",
)
LFM3_NAMES = NAMES._replace(output=LLAMA.output, head_norms=LLAMA.head_norms)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lfm2Config(DecoderConfig):
    width: int
    """Of the convolutions."""
    conv_bias: bool


def with_convolutions(keys: ConfigKeys, config: DecoderConfig, kinds: Sequence[str], width: int) -> Lfm2Config:
    """With convolutions in the layers of this kind, by default of ``width``; and what all attention has."""
    D, width = config.hidden_size, keys.size("conv_L_cache", width, low=2)
    of_conv = state_layer(conv_state(width, D, D))
    config = config.with_attention(head_norm=HeadNorm(), has_output_bias=False)
    config = config.with_caches([of_conv if kind == CONV else None for kind in kinds])
    return config.extended(Lfm2Config, width=width, conv_bias=keys.flag("conv_bias"))


def read_lfm2(keys: ConfigKeys, max_len: int | None) -> Lfm2Config:
    """Read the configuration, without experts."""
    num_layers = keys.size("num_hidden_layers")
    config = read_decoder(
        keys,
        max_len,
        tied=keys.flag("tie_embedding", True),
        eps=keys.number("norm_eps", 1e-5),
        windows=NO_WINDOWS,
        ffn_size=keys.get("block_ff_dim"),
        names=NAMES,
    )
    attends = keys.get("full_attn_idxs")
    kinds = keys.choices("layer_types", (CONV, FULL), num_layers)
    if kinds is None and isinstance(attends, list | tuple):
        kinds = tuple(FULL if i in attends else CONV for i in range(num_layers))
    kinds = kinds or layer_kinds(keys, "layer_types", (CONV, FULL), num_layers)
    return with_convolutions(keys, config, kinds, 3)


def _ffn_size(keys: ConfigKeys, stored: int) -> int:
    """The width of feed-forward layers: two thirds of the one that is stored, unless it is not to be adjusted."""
    multiplier, multiple = keys.get("block_ffn_dim_multiplier", 1.0), keys.size("block_multiple_of", 256)
    if not keys.flag("block_auto_adjust_ff_dim", True):
        return stored
    width = int(multiplier * int(2 * stored / 3))
    return -(-width // multiple) * multiple


class Lfm2Layer(HybridLayer):
    def load_recurrence(self, config: DecoderConfig, weights: WeightLoader, prefix: str) -> Recurrence:
        assert isinstance(config, Lfm2Config)
        D, name, has_bias = config.hidden_size, f"{prefix}.conv", config.conv_bias
        channels = Section(D, D)
        projections = weights.fused([MatrixRows(f"{name}.in_proj", [channels] * 3)], D, has_bias)
        bias = weights.exact_part(f"{name}.conv.bias", channels) if has_bias else None
        conv_WD = weights.conv([f"{name}.conv"], [channels], config.width)
        self.o_proj = weights.row(f"{name}.out_proj", D, D, has_bias)
        return ShortConv(self.input_norm, projections, conv_WD, bias)


class Lfm2ForCausalLM(Decoder):
    layer_class = Lfm2Layer

    @classmethod
    def read_config(cls, keys: ConfigKeys, max_len: int | None) -> DecoderConfig:
        config = read_lfm2(keys, max_len)
        plain = config.layers[0].mlp
        assert isinstance(plain, MLPPart)
        mlp = dataclasses.replace(plain, size=_ffn_size(keys, config.ffn_size))
        return config.with_mlps(lambda _: mlp)


class Lfm2MoeForCausalLM(Lfm2ForCausalLM):
    @classmethod
    def read_config(cls, keys: ConfigKeys, max_len: int | None) -> DecoderConfig:
        config, dense = read_lfm2(keys, max_len), keys.size("num_dense_layers", 2, low=0)
        moe = read_experts(
            keys,
            config,
            count_keys=("num_experts",),
            num_chosen=4,
            expert_size=keys.size("moe_intermediate_size", 1792),
            normalises=keys.flag("norm_topk_prob", True),
            is_sparse=tuple(i >= dense for i in range(config.num_layers)),
        )
        scale = keys.number("routed_scaling_factor", 1.0)
        return config.with_experts(
            ExpertsPart(
                moe=moe,
                routing=Routing(moe.num_chosen, moe.normalises, "sigmoid", scale),
                router="feed_forward.gate",
                correction="feed_forward.expert_bias" if keys.flag("use_expert_bias", True) else None,
                experts="feed_forward.experts",
                projections=("w1", "w3", "w2"),
            )
        )


class Lfm3ForCausalLM(Lfm2ForCausalLM):
    @classmethod
    def read_config(cls, keys: ConfigKeys, max_len: int | None) -> DecoderConfig:
        count = keys.size("num_hidden_layers")
        kinds = keys.choices("layer_types", (CONV, FULL, SLIDING), count) or tuple(
            FULL if i % 4 == 2 else SLIDING if i % 4 == 0 and i else CONV for i in range(count)
        )
        added = ("post_operator_norm", "post_ffn_norm") if keys.flag("use_sandwich_norm", True) else (None, None)
        full, local = ropes_by_type(keys, 1e6, 10_000.0)
        full = {"rope_type": "proportional", "partial_rotary_factor": 0.5, **full}
        config = read_decoder(
            keys,
            max_len,
            tied=True,
            eps_key="norm_eps",
            eps=1e-5,
            head_dim=128,
            rope=local,
            windows=([FULL if kind == CONV else kind for kind in kinds], keys.size("sliding_window", 256)),
            mlp_bias=False,
            names=LFM3_NAMES._replace(after_attention=added[0], after_mlp=added[1]),
        )
        ropes = {SLIDING: config.ropes[0], FULL: config.rope(full, max_len)}
        used = [kind for kind in ropes if kind in kinds]
        config = dataclasses.replace(config, ropes=tuple(ropes[kind] for kind in used))
        gate = GatePart("self_attn.gate_proj", is_of_head=True) if keys.flag("use_attention_gate", True) else None
        has_bias = config.layers[0].attention.has_bias
        config = with_convolutions(keys, config, kinds, 7)
        own_ropes = [used.index(kind) if kind in used else None for kind in kinds]
        return config.with_attention(gate=gate, rope=own_ropes, has_output_bias=has_bias)
