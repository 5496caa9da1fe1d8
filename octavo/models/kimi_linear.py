"""Kimi-Linear (arXiv 2510.26692): Kimi Delta Attention, and in every few layers latent attention without positions; all
layers but the first have experts, routed as in DeepSeek-V3."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from octavo.layers.linear import Linear
from octavo.layers.recurrent import KimiDelta
from octavo.layers.rotary import ProportionalRope
from octavo.models import mixtral
from octavo.models.config_keys import ONE_ACTIVATION, ConfigKeys, wrong
from octavo.models.decoder import Decoder
from octavo.models.decoder_layer import FeedForward
from octavo.models.deepseek import DeepseekConfig, DeepseekLayer, read_deepseek
from octavo.models.hybrid import LINEAR, HybridLayer, Recurrence
from octavo.models.linear_parts import MatrixRows
from octavo.models.loader import WeightLoader
from octavo.models.model_config import FULL
from octavo.models.parts import DecoderConfig, Names
from octavo.models.qwen3_next import DeltaSizes, delta_heads
from octavo.ops.recurrent.gated_delta import DeltaHeads
from octavo.quant.stored.shard import Section

NAMES = {
    "model_max_length": "max_position_embeddings",
    "moe_renormalize": "norm_topk_prob",
    "moe_router_activation_func": "scoring_func",
    "num_expert_group": "n_group",
    "num_experts_per_token": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
}
"""Keys of checkpoints to those of DeepSeek's."""
DEFAULTS = {
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 1024,
    "n_group": 1,
    "num_experts": 256,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-5,
    "routed_scaling_factor": 2.446,
    "topk_group": 1,
}
UNUSED = ("num_nextn_predict_layers", "qk_head_dim", "rope_scaling", "rope_theta", "rope_parameters")
"""No position is rotated."""


EXPERTS: dict[str, Any] = {
    **mixtral.EXPERTS,
    "correction": "block_sparse_moe.gate.e_score_correction_bias",
    "shared": ("block_sparse_moe.shared_experts.gate_proj", "block_sparse_moe.shared_experts.up_proj"),
    "shared_down": "block_sparse_moe.shared_experts.down_proj",
}
BLOCK = Names(ups=("block_sparse_moe.gate_proj", "block_sparse_moe.up_proj"), down="block_sparse_moe.down_proj")
"""Dense layers are named like those with experts in checkpoints that transformers has written."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class KimiLinearConfig(DeepseekConfig):
    delta: DeltaSizes


def load_projected(
    config: KimiLinearConfig, weights: WeightLoader, name: str, others: Mapping[str, Section]
) -> tuple[Linear, Tensor, DeltaHeads]:
    """One map to queries, keys, values, the strengths of updates and ``others``, which lead to decays and gates; the
    weights of the convolution over the first three [W, C]; and the heads."""
    sizes = config.delta
    parts = {**dict(zip("qkv", sizes.channels, strict=True)), "b": Section(sizes.num_heads, sizes.num_heads), **others}
    rows = [MatrixRows(f"{name}.{part}_proj", [own]) for part, own in parts.items()]
    conv_WC = weights.conv([f"{name}.{part}_conv1d" for part in "qkv"], sizes.channels, sizes.width)
    heads = delta_heads(sizes, weights, name, config.norm_eps, "o_norm", decays_of_head=sizes.key_dim)
    return weights.fused(rows, config.hidden_size), conv_WC, heads._replace(gate="sigmoid")


class KimiLinearLayer(HybridLayer, DeepseekLayer):
    def load_recurrence(self, config: DecoderConfig, weights: WeightLoader, prefix: str) -> Recurrence:
        assert isinstance(config, KimiLinearConfig)
        D, sizes, name = config.hidden_size, config.delta, f"{prefix}.self_attn"
        N, K = sizes.num_heads, sizes.key_dim
        narrow = dict.fromkeys(("f_a", "g_a"), Section(K, 1))
        projections, conv_WC, heads = load_projected(config, weights, name, narrow)
        decays, gates = (weights.column(f"{name}.{part}_b_proj", N * K, K, num_heads=N) for part in "fg")
        self.o_proj = weights.row(f"{name}.o_proj", D, sizes.values)
        return KimiDelta(self.input_norm, projections, conv_WC, (decays, gates), K, heads)

    def feed_forward(self, config: DecoderConfig, weights: WeightLoader, prefix: str, index: int) -> FeedForward:
        if weights.tensors.has_module(f"{prefix}.{BLOCK.down}"):
            config = dataclasses.replace(config, names=BLOCK)
        return super().feed_forward(config, weights, prefix, index)


def _read_delta(keys: ConfigKeys) -> tuple[DeltaSizes, tuple[str, ...]]:
    """The sizes of the recurrent layers, and the kinds of all; checkpoints number layers from one."""
    given, num_layers = keys.get("linear_attn_config", {}), keys.size("num_hidden_layers")
    if not isinstance(given, Mapping):
        raise wrong("linear_attn_config", given, "an object")
    own = ConfigKeys(given)
    heads = own.size("num_heads", keys.size("linear_num_heads", 32))
    width = own.size("head_dim", keys.size("linear_head_dim", 128))
    conv = own.size("short_conv_kernel_size", keys.size("linear_conv_kernel_dim", 4, low=2), low=2)
    attends = own.get("full_attn_layers")
    kinds = keys.choices("layer_types", (LINEAR, FULL), num_layers)
    if kinds is None and isinstance(attends, list | tuple):
        kinds = tuple(FULL if i + 1 in attends else LINEAR for i in range(num_layers))
    kinds = kinds or tuple(FULL if i and i % 4 == 0 else LINEAR for i in range(num_layers))
    own.get("kda_layers")
    if left := own.unread():
        raise wrong("linear_attn_config", left[0], "without keys that are not known")
    return DeltaSizes(heads, heads, width, width, conv), kinds


class KimiLinearForCausalLM(Decoder):
    layer_class = KimiLinearLayer

    @classmethod
    def read_config(cls, keys: ConfigKeys, max_len: int | None) -> DecoderConfig:
        for key in ("mla_use_nope", "use_grouped_topk"):
            if not keys.flag(key, True):
                raise wrong(key, False, "true")
        keys.must_be(ONE_ACTIVATION)
        delta, kinds = _read_delta(keys)
        keys.pass_over(*UNUSED, *NAMES)
        given: dict[str, Any] = {NAMES.get(key, key): value for key, value in keys.values.items() if key not in UNUSED}
        own = keys.over({**DEFAULTS, **given, "head_dim": None})
        config = read_deepseek(own, max_len, "sigmoid", **EXPERTS)
        unrotated = ProportionalRope(1.0, 0.0), config.rotated_size
        config = dataclasses.replace(config.with_attention(is_adjacent=False), ropes=(unrotated,))
        latent = config.layers[0].cache
        config = config.with_caches([delta.cache if kind == LINEAR else latent for kind in kinds])
        return config.extended(KimiLinearConfig, delta=delta)
