"""DeepSeek-V2 (arXiv 2405.04434) and V3 (arXiv 2412.19437): multi-head latent attention (MLA), group-limited routing.

Keys and values of all heads are linear maps of one latent vector; all heads share one rotated key. With the weights
absorbed, queries are projected into the latent space and outputs back out of it, so attention has a single KV head
whose key is (rotated part, latent) and whose value is that key. The cache holds nothing else.

Shapes: T tokens of the step, D model, N heads, L latent, P unrotated part of a head, R rotated part, H = R + L,
V value part of a head, X experts, G groups of experts.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from octavo.layers.attention import latent_attention
from octavo.layers.moe import ExpertRouter, MoE, SharedExpert
from octavo.layers.output_mlp import output_mlp
from octavo.models.config import ACTIVATIONS, read_common
from octavo.models.config_keys import ConfigKeys, wrong
from octavo.models.layer_cache import LayerCacheSpec
from octavo.models.llama import FeedForward, LlamaConfig, LlamaForCausalLM, LlamaLayer
from octavo.models.loader import ExpertShape, WeightLoader
from octavo.models.moe import MoESettings, read_dense_first, read_experts
from octavo.models.rope import RopeContext, half_split_rows, read_rope, rope_values, yarn_scale
from octavo.ops.attention import LayerCache, PagedRows
from octavo.ops.latent_attention import EXPANDED_WIDTHS, LatentHeads, expanded_bytes, expanded_positions
from octavo.ops.moe import Routing

LATENT_EPS = 1e-6
"""Epsilon of the norms within attention, independent of ``rms_norm_eps``."""


@dataclass(frozen=True, kw_only=True)
class DeepseekConfig(LlamaConfig):
    """``head_dim`` is the width of a cached entry: the rotated part and the latent."""

    query_rank: int
    """Rank of the query projection; 0: queries are projected directly from the residual stream."""
    latent_size: int
    plain_size: int
    """Width of the part of a head that is not rotated."""
    value_size: int
    scale: float
    is_interleaved: bool
    """Whether rotated pairs are adjacent numbers, not half a width apart."""
    scoring: str
    """"softmax" or "sigmoid"."""
    num_groups: int
    num_chosen_groups: int
    share_scale: float
    """Scaling factor of the routing weights."""

    @property
    def cache(self) -> tuple[LayerCacheSpec, ...]:
        return (LayerCacheSpec(1, self.head_dim, kind="latent"),) * self.num_layers

    def expanded_bytes(self, longest: int, itemsize: int, num_ranks: int) -> int:
        if (self.plain_size, self.rotary_width, self.value_size) != EXPANDED_WIDTHS:
            return 0
        heads = max(1, self.num_heads // num_ranks)
        return expanded_bytes(heads, expanded_positions(heads, longest, itemsize), itemsize)


def read_deepseek(keys: ConfigKeys, max_len: int | None, scoring: str) -> DeepseekConfig:
    """Read the configuration of V2 (``scoring`` "softmax") or V3 ("sigmoid")."""
    rotated, plain = keys.size("qk_rope_head_dim"), keys.size("qk_nope_head_dim")
    latent = keys.size("kv_lora_rank", 512)
    common = read_common(keys, head_dim=rotated)
    given, most = rope_values(keys), common["max_position_embeddings"]
    common["head_dim"], common["num_kv_heads"] = rotated + latent, 1
    has_bias = keys.flag("attention_bias")
    activation = keys.choice("hidden_act", ACTIVATIONS, "silu")
    mscale = given.get("mscale_all_dim", 0) if given.get("rope_type", given.get("type")) == "yarn" else 0
    growth = yarn_scale(given.get("factor", 1.0), mscale) if mscale else 1.0
    first = keys.size("first_k_dense_replace", 0 if scoring == "softmax" else 3, low=0)
    expert_size = keys.size("moe_intermediate_size")
    moe = read_experts(
        keys,
        common["num_layers"],
        common["ffn_size"],
        activation,
        count_keys=("n_routed_experts", "num_local_experts", "num_experts"),
        num_chosen=8,
        expert_size=expert_size,
        normalises=keys.flag("norm_topk_prob", scoring == "sigmoid"),
        is_sparse=read_dense_first(keys, common["num_layers"], first),
        shared_size=expert_size * keys.size("n_shared_experts", 2 if scoring == "softmax" else 1),
    )
    common["ffn_size"] = moe.widest
    groups, chosen_groups = _groups(keys, moe, scoring)
    return DeepseekConfig(
        **common,
        rope=read_rope(given, RopeContext(rotated, max_len or most, most)),
        rotary_width=rotated,
        attention_bias=has_bias,
        output_bias=has_bias,
        mlp_bias=keys.flag("mlp_bias"),
        activation=activation,
        moe=moe,
        query_rank=0 if keys.get("q_lora_rank") is None else keys.size("q_lora_rank"),
        latent_size=latent,
        plain_size=plain,
        value_size=keys.size("v_head_dim", 128),
        scale=(plain + rotated) ** -0.5 * growth * growth,
        is_interleaved=keys.flag("rope_interleave", True),
        scoring=scoring,
        num_groups=groups,
        num_chosen_groups=chosen_groups,
        share_scale=keys.number("routed_scaling_factor", 1.0 if scoring == "softmax" else 2.5),
    )


def _groups(keys: ConfigKeys, moe: MoESettings, scoring: str) -> tuple[int, int]:
    """The number of expert groups, and of groups selected per token; refuses values that neither version uses."""
    methods = {"softmax": ("greedy", "group_limited_greedy"), "sigmoid": ("noaux_tc",)}[scoring]
    method = keys.choice("topk_method", {name: name for name in methods}, methods[0])
    keys.choice("scoring_func", {scoring: None}, scoring)
    if keys.size("moe_layer_freq", 1) != 1:
        raise wrong("moe_layer_freq", keys.get("moe_layer_freq"), "1")
    if scoring == "softmax" and moe.normalises:
        raise wrong("norm_topk_prob", True, "false for this version")
    for key in ("aux_loss_alpha", "seq_aux", "ep_size", "qk_head_dim", "num_nextn_predict_layers", "num_mtp_layers"):
        keys.get(key)
    defaults = {"softmax": (1, 1), "sigmoid": (8, 4)}[scoring]
    groups, chosen = keys.size("n_group", defaults[0]), keys.size("topk_group", defaults[1])
    if method == "greedy":
        return 1, 1
    if moe.num_experts % groups or chosen > groups:
        raise wrong("n_group", groups, f"a divisor of the {moe.num_experts} experts and at least topk_group")
    if scoring == "sigmoid" and moe.num_experts < 2 * groups:
        raise wrong("n_group", groups, "such that each group has at least two experts")
    return groups, chosen


class DeepseekLayer(LlamaLayer):
    experts_name = "mlp"
    expert_names = "gate_proj", "up_proj", "down_proj"

    def __init__(self, config: DeepseekConfig, weights: WeightLoader, prefix: str, index: int) -> None:
        D, N, L, R = config.hidden_size, config.num_heads, config.latent_size, config.rotary_width
        name, head = f"{prefix}.self_attn", config.plain_size + R
        self.query_rank = config.query_rank
        self.input_norm = weights.norm(f"{prefix}.input_layernorm", D, config.norm_eps)
        rank, query = self.query_rank, f"{name}.q_b_proj" if self.query_rank else f"{name}.q_proj"
        query_order = kv_order = None
        if config.is_interleaved:
            query_order = half_split_rows(N, head, R, first=config.plain_size)
            kv_order = half_split_rows(1, L + R, R, first=L)
        if rank:
            self.q_a_proj = weights.replicated(f"{name}.q_a_proj", rank, D, config.attention_bias)
            self.q_norm = weights.norm(f"{name}.q_a_layernorm", rank, LATENT_EPS)
        self.q_proj = weights.column(query, N * head, rank or D, num_heads=N, order=query_order)
        kv_name = f"{name}.kv_a_proj_with_mqa"
        self.kv_proj = weights.replicated(kv_name, L + R, D, config.attention_bias, order=kv_order)
        kv_norm = weights.norm(f"{name}.kv_a_layernorm", L, LATENT_EPS)
        sizes = [config.plain_size, config.value_size]
        maps = weights.matrix(f"{name}.kv_b_proj", N * sum(sizes), L, num_heads=N).view(-1, sum(sizes), L)
        key_map_NPL, value_map_NVL = maps.split_with_sizes(sizes, dim=1)
        self.latent_heads = LatentHeads(
            key_map_NLP=key_map_NPL.mT.contiguous(),
            value_map_NVL=value_map_NVL.contiguous(),
            norm_L=kv_norm.weight_D,
            norm_eps=kv_norm.eps,
            scale=config.scale,
        )
        self.o_proj = weights.row(f"{name}.o_proj", D, N * config.value_size, config.output_bias)
        self.mlp = self.feed_forward(config, weights, prefix, index)

    def mixture(self, config: LlamaConfig, moe: MoESettings, weights: WeightLoader, prefix: str) -> FeedForward:
        assert isinstance(config, DeepseekConfig)
        mlp, D, X, F = f"{prefix}.{self.experts_name}", config.hidden_size, moe.num_experts, moe.shared_size
        bias = weights.exact(f"{mlp}.gate.e_score_correction_bias", X) if config.scoring == "sigmoid" else None
        routing = Routing(
            moe.num_chosen,
            moe.normalises,
            "softmax" if bias is None else "sigmoid",
            config.share_scale,
            (config.num_groups, config.num_chosen_groups),
            correction_X=bias,
        )
        norm = weights.norm(f"{prefix}.post_attention_layernorm", D, config.norm_eps)
        router = ExpertRouter(norm, weights.router(f"{mlp}.gate", X, D), routing)
        shared = SharedExpert(
            weights.gate_up([f"{mlp}.shared_experts.{part}_proj" for part in ("gate", "up")], F, D, config.mlp_bias),
            weights.partial_row(f"{mlp}.shared_experts.down_proj", D, F, config.mlp_bias),
            config.activation,
        )
        experts = weights.experts(
            f"{mlp}.experts", ExpertShape(X, D, moe.expert_size, moe.activation, *self.expert_names)
        )
        return MoE(router, experts, shared, weights.collective)

    def __call__(self, x_TD: Tensor, angles: tuple[Tensor, Tensor], cache: LayerCache, rows: PagedRows) -> Tensor:
        h_TD = self.input_norm(x_TD)
        q_TW = self.q_proj(self.q_a_proj(h_TD), norm=self.q_norm) if self.query_rank else self.q_proj(h_TD)
        out_TNV = latent_attention(q_TW, self.kv_proj(h_TD), self.latent_heads, *angles, cache, rows)
        out_TNV, x_TD = rows.pick(out_TNV, x_TD)
        return output_mlp(self.o_proj, self.mlp, out_TNV.flatten(1), x_TD)


class DeepseekV2ForCausalLM(LlamaForCausalLM):
    layer_class = DeepseekLayer

    @classmethod
    def read_config(cls, keys: ConfigKeys, max_len: int | None) -> DeepseekConfig:
        return read_deepseek(keys, max_len, "softmax")


class DeepseekV3ForCausalLM(DeepseekV2ForCausalLM):
    @classmethod
    def read_config(cls, keys: ConfigKeys, max_len: int | None) -> DeepseekConfig:
        return read_deepseek(keys, max_len, "sigmoid")
