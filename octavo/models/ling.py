"""Ling and Ring 1, 2 (Ant Group's BailingMoE, arXiv 2510.22115) and 3: all but the first layers have experts.

The first two fuse queries, keys and values; the second normalises heads, and chooses experts by sigmoids within groups.
The third is like Kimi-Linear: Kimi Delta Attention, whose decays are bounded, and in every few layers latent attention,
with positions and with gates of heads.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from octavo.layers.recurrent import KimiDelta
from octavo.models.config_keys import ONE_ACTIVATION, ConfigKeys, wrong
from octavo.models.decoder import Decoder, read_decoder
from octavo.models.deepseek import DeepseekLayer, read_deepseek
from octavo.models.hybrid import LINEAR, HybridLayer, Recurrence
from octavo.models.kimi_linear import NAMES as KEYS
from octavo.models.kimi_linear import KimiLinearConfig, load_projected
from octavo.models.loader import WeightLoader
from octavo.models.model_config import FULL
from octavo.models.moe_config import read_dense_first, read_experts, read_sigmoid_routing
from octavo.models.parts import DecoderConfig, ExpertsPart, GatePart, HeadNorm, Names
from octavo.models.qwen3_next import DeltaSizes
from octavo.ops.moe import Routing
from octavo.quant.stored.shard import Section

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


class LingDecoder(Decoder):
    @staticmethod
    def own_name(name: str) -> str:
        """That of a weight in published checkpoints; the library names embeddings otherwise if there is no head."""
        end = name.removeprefix("embed_tokens.")
        return name if end == name else f"word_embeddings.{end}"


class BailingMoeV2ForCausalLM(LingDecoder):
    @classmethod
    def read_config(cls, keys: ConfigKeys, max_len: int | None) -> DecoderConfig:
        keys.must_be({"norm_head": (False,), "use_rmsnorm": (True,)})
        keys.pass_over(*UNUSED)
        has_bias = keys.flag("use_bias")
        has_query_bias = keys.flag("use_qkv_bias") or has_bias
        config = read_decoder(keys, max_len, rotary=1.0, has_bias=has_query_bias, mlp_bias=has_bias, names=NAMES)
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class BailingHybridConfig(KimiLinearConfig):
    lowest: float
    """The bound of the exponents of decays, 0: none."""


class BailingHybridLayer(HybridLayer, DeepseekLayer):
    def load_recurrence(self, config: DecoderConfig, weights: WeightLoader, prefix: str) -> Recurrence:
        assert isinstance(config, BailingHybridConfig)
        D, sizes, name = config.hidden_size, config.delta, f"{prefix}.attention"
        N, K = sizes.num_heads, sizes.key_dim
        others = {"f": Section(N * K, N), "g": Section(sizes.values, N)}
        projections, conv_WC, heads = load_projected(config, weights, name, others)
        self.o_proj = weights.row(f"{prefix}.{config.names.output}", D, sizes.values)
        return KimiDelta(self.input_norm, projections, conv_WC, None, 0, heads._replace(lowest=config.lowest))


class BailingHybridForCausalLM(LingDecoder):
    layer_class = BailingHybridLayer

    @classmethod
    def read_config(cls, keys: ConfigKeys, max_len: int | None) -> DecoderConfig:
        keys.must_be(ONE_ACTIVATION)
        num_layers, every = keys.size("num_hidden_layers"), keys.size("layer_group_size", 6)
        kinds = keys.choices("layer_types", (LINEAR, FULL), num_layers)
        kinds = kinds or tuple(LINEAR if (i + 1) % every else FULL for i in range(num_layers))
        heads = keys.size("linear_num_heads", keys.size("num_attention_heads"))
        width = keys.size("linear_head_dim", keys.size("head_dim", 128))
        conv = keys.size("linear_conv_kernel_dim", keys.size("short_conv_kernel_size", 4, low=2), low=2)
        bound = keys.get("kda_lower_bound", -5.0)
        if type(bound) not in (int, float) or not -1e3 < bound < 0:
            raise wrong("kda_lower_bound", bound, "a negative number")
        keys.pass_over("mtp_loss_scaling_factor", *KEYS, *UNUSED)
        given: dict[str, Any] = {KEYS.get(key, key): value for key, value in keys.values.items() if value is not None}
        defaults = {"first_k_dense_replace": 2, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "rope_theta": 6e6}
        own = keys.over({**defaults, **given, "head_dim": None})
        config = read_deepseek(own, max_len, "sigmoid", correction="mlp.gate.expert_bias")
        delta = DeltaSizes(heads, heads, width, width, conv)
        latent = config.layers[0].cache
        config = config.with_caches([delta.cache if kind == LINEAR else latent for kind in kinds])
        config = config.with_attention(gate=GatePart("attention.g_proj", is_of_head=True))
        lowest = float(bound) if keys.flag("kda_safe_gate", True) else 0.0
        return dataclasses.replace(config, names=NAMES).extended(BailingHybridConfig, delta=delta, lowest=lowest)
