"""DeepSeekMoE (arXiv 2401.06066), DeepSeek-V2 (2405.04434), V3 (2412.19437): shared experts, latent attention (MLA).

The first has Llama's attention. In the others, keys and values of all heads are linear maps of one latent vector; all
heads share one rotated key. With the weights absorbed, queries are projected into the latent space and outputs back out
of it, so attention has a single KV head whose key is (rotated part, latent) and whose value is that key. The cache
holds nothing else.

Shapes: T tokens of the step, D model, N heads, L latent, P unrotated part of a head, R rotated part, H = R + L,
V value part of a head, X experts, G groups of experts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from torch import Tensor

from octavo.layers.attention import latent_attention
from octavo.layers.attention_inputs import StepAngles, gated
from octavo.models.config_keys import ConfigKeys, wrong
from octavo.models.decoder import NO_WINDOWS, Decoder, read_decoder
from octavo.models.decoder_layer import DecoderLayer, FeedForward
from octavo.models.layer_cache import LayerCacheSpec
from octavo.models.loader import WeightLoader
from octavo.models.moe_config import MoESettings, read_dense_first, read_experts
from octavo.models.parts import DecoderConfig, ExpertsPart
from octavo.models.rope_keys import half_split_rows, rope_values, yarn_scale
from octavo.ops.attention.attention import LayerCache, PagedRows
from octavo.ops.attention.choose_keys import ChosenKeys
from octavo.ops.attention.latent_attention import EXPANDED_WIDTHS, LatentHeads, expanded_bytes, expanded_positions
from octavo.ops.moe import Routing

Config = TypeVar("Config", bound=DecoderConfig)
LATENT_KEYS = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
LATENT_EPS = 1e-6
"""Epsilon of the norms within attention, independent of ``rms_norm_eps``."""


@dataclass(frozen=True, kw_only=True)
class DeepseekConfig(DecoderConfig):
    """``head_dim`` is the width of a cached entry: the rotated part and the latent."""

    query_rank: int
    """Rank of the query projection; 0: queries are projected directly from the residual stream."""
    latent_size: int
    plain_size: int
    """Width of the part of a head that is not rotated."""
    rotated_size: int
    value_size: int
    latent_eps: float = LATENT_EPS

    def expanded_bytes(self, longest: int, num_tokens: int, itemsize: int, num_ranks: int) -> int:
        if (self.plain_size, self.rotated_size, self.value_size) != EXPANDED_WIDTHS:
            return 0
        heads = max(1, self.num_heads // num_ranks)
        return expanded_bytes(heads, expanded_positions(heads, longest, itemsize), itemsize)


def read_latent(keys: ConfigKeys, max_len: int | None, rope: Mapping[str, Any] | None = None) -> DeepseekConfig:
    """Read the configuration, without experts; ``rope``: the rotary keys, if they are not in the usual place."""
    keys.must_be({"use_mla": (True,)})
    rotated, plain = keys.size("qk_rope_head_dim", low=0), keys.size("qk_nope_head_dim")
    latent, given = keys.size("kv_lora_rank", 512), dict(rope or rope_values(keys))
    given.pop("partial_rotary_factor", None)
    keys.get("head_dim")
    config = read_decoder(
        keys.over({**keys.values, "head_dim": rotated or plain}), max_len, rope=given, windows=NO_WINDOWS
    )
    mscale = given.get("mscale_all_dim", 0) if given.get("rope_type", given.get("type")) == "yarn" else 0
    growth = yarn_scale(given.get("factor", 1.0), mscale) if mscale else 1.0
    config = config.with_attention(
        scale=(plain + rotated) ** -0.5 * growth * growth,
        is_adjacent=rotated > 0 and keys.flag("rope_interleave", True),
    )
    config = dataclasses.replace(config, head_dim=rotated + latent, num_kv_heads=1)
    cache = LayerCacheSpec(1, rotated + latent, kind="latent")
    return config.with_caches([cache] * config.num_layers).extended(
        DeepseekConfig,
        query_rank=0 if keys.get("q_lora_rank") is None else keys.size("q_lora_rank"),
        latent_size=latent,
        plain_size=plain,
        rotated_size=rotated,
        value_size=keys.size("v_head_dim", 128),
    )


def read_deepseek(keys: ConfigKeys, max_len: int | None, scoring: str, **names: Any) -> DeepseekConfig:
    """Read the configuration of V2 (``scoring`` "softmax") or V3 ("sigmoid"); ``names``: other ones in
    ``ExpertsPart``."""
    return with_experts(keys, read_latent(keys, max_len), scoring, **names)


def with_experts(keys: ConfigKeys, config: Config, scoring: str, **names: Any) -> Config:
    """With the experts of V2 or V3."""
    is_v2, expert_size = scoring == "softmax", keys.size("moe_intermediate_size")
    first = keys.size("first_k_dense_replace", 0 if is_v2 else 3, low=0)
    moe = read_experts(
        keys,
        config,
        count_keys=("n_routed_experts", "num_local_experts", "num_experts"),
        num_chosen=8,
        expert_size=expert_size,
        normalises=keys.flag("norm_topk_prob", not is_v2),
        is_sparse=read_dense_first(keys, config.num_layers, first),
        shared_size=expert_size * keys.size("n_shared_experts", 2 if is_v2 else 1, low=0),
    )
    scale, groups = keys.number("routed_scaling_factor", 1.0 if is_v2 else 2.5), _groups(keys, moe, scoring)
    routing = Routing(moe.num_chosen, moe.normalises, "softmax" if is_v2 else "sigmoid", scale, groups)
    if not is_v2:
        names = {"correction": "mlp.gate.e_score_correction_bias", **names}
    return config.with_experts(ExpertsPart(moe=moe, routing=routing, shared_has_bias=keys.flag("mlp_bias"), **names))


def _groups(keys: ConfigKeys, moe: MoESettings, scoring: str) -> tuple[int, int]:
    """The number of expert groups, and of groups selected per token; refuses values that neither version uses."""
    methods = {"softmax": ("greedy", "group_limited_greedy"), "sigmoid": ("noaux_tc",)}[scoring]
    method = keys.choice("topk_method", {name: name for name in methods}, methods[0])
    keys.choice("scoring_func", {scoring: None}, scoring)
    if keys.size("moe_layer_freq", 1) != 1:
        raise wrong("moe_layer_freq", keys.get("moe_layer_freq"), "1")
    if scoring == "softmax" and moe.normalises:
        raise wrong("norm_topk_prob", True, "false for this version")
    keys.pass_over("aux_loss_alpha", "seq_aux", "ep_size", "qk_head_dim", "num_nextn_predict_layers", "num_mtp_layers")
    defaults = {"softmax": (1, 1), "sigmoid": (8, 4)}[scoring]
    groups, chosen = keys.size("n_group", defaults[0]), keys.size("topk_group", defaults[1])
    if method == "greedy":
        return 1, 1
    if moe.num_experts % groups or chosen > groups:
        raise wrong("n_group", groups, f"a divisor of the {moe.num_experts} experts and at least topk_group")
    if scoring == "sigmoid" and moe.num_experts < 2 * groups:
        raise wrong("n_group", groups, "such that each group has at least two experts")
    return groups, chosen


class DeepseekLayer(DecoderLayer):
    def load_mixer(self, config: DecoderConfig, weights: WeightLoader, prefix: str, index: int) -> None:
        assert isinstance(config, DeepseekConfig)
        D, N, L, R = config.hidden_size, config.num_heads, config.latent_size, config.rotated_size
        module = config.names.output.rpartition(".")[0]
        name, has_bias = f"{prefix}.{module}", self.part.has_bias
        self.query_rank = rank = config.query_rank
        kv_order = half_split_rows(1, L + R, R, first=L) if self.part.is_adjacent else None
        if rank:
            self.q_a_proj = weights.replicated(f"{name}.q_a_proj", rank, D, has_bias)
            self.q_norm = weights.norm(f"{name}.q_a_layernorm", rank, config.latent_eps)
        self.load_queries(config, weights, name)
        self.kv_proj = weights.replicated(f"{name}.kv_a_proj_with_mqa", L + R, D, has_bias, order=kv_order)
        kv_norm = weights.norm(f"{name}.kv_a_layernorm", L, config.latent_eps)
        sizes = [config.plain_size, config.value_size]
        maps = weights.matrix(f"{name}.kv_b_proj", N * sum(sizes), L, num_heads=N).view(-1, sum(sizes), L)
        key_map_NPL, value_map_NVL = maps.split_with_sizes(sizes, dim=1)
        self.latent_heads = LatentHeads(
            key_map_NLP=key_map_NPL.mT.contiguous(),
            value_map_NVL=value_map_NVL.contiguous(),
            norm_L=kv_norm.weight_D,
            norm_eps=kv_norm.eps,
            scale=self.part.scale,
        )
        output = f"{prefix}.{config.names.output}"
        self.o_proj = weights.row(output, D, N * config.value_size, self.part.has_output_bias)
        self.gates = None
        self.gate_function: Literal["sigmoid", "softplus"] = "sigmoid"
        if (gate := self.part.gate) is not None:
            self.gate_function = gate.function
            self.gates = weights.column(f"{prefix}.{gate.name}", self.part.gate_rows, D, num_heads=N)

    def load_queries(self, config: DeepseekConfig, weights: WeightLoader, name: str) -> None:
        """Load the projection of queries from the residual stream, or from the numbers of ``q_a_proj``."""
        N, R, rank = config.num_heads, config.rotated_size, config.query_rank
        head = config.plain_size + R
        order = half_split_rows(N, head, R, first=config.plain_size) if self.part.is_adjacent else None
        query = f"{name}.q_b_proj" if rank else f"{name}.q_proj"
        self.q_proj = weights.column(query, N * head, rank or config.hidden_size, num_heads=N, order=order)

    def queries(self, h_TD: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """The queries of normed rows, what they are projected from, and the gates of what attention gives, if any."""
        q_TD = self.q_a_proj(h_TD) if self.query_rank else h_TD
        q_TW = self.q_proj(q_TD, norm=self.q_norm) if self.query_rank else self.q_proj(q_TD)
        return q_TW, q_TD, None if self.gates is None else self.gates(h_TD)

    def mix(self, x_TD: Tensor, step: StepAngles, cache: LayerCache, rows: PagedRows) -> Tensor:
        cos_TR, sin_TR = step.angles[self.part.rope or 0]
        h_TD = self.input_norm(x_TD)
        q_TW, q_TD, gates_TG = self.queries(h_TD)
        if step.query_scale_T1 is not None:
            q_TW.mul_(step.query_scale_T1)
        kv_TC, chosen = self.latents(h_TD), self.chosen(h_TD, q_TD, step, cache, rows)
        attended_TN = latent_attention(q_TW, kv_TC, self.latent_heads, cos_TR, sin_TR, cache, rows, chosen).flatten(1)
        return attended_TN if gates_TG is None else gated(gates_TG, attended_TN, self.gate_function)

    def latents(self, h_TD: Tensor) -> Tensor:
        """The latents of normed rows, and the numbers of their keys that are rotated."""
        return self.kv_proj(h_TD)

    def chosen(
        self, h_TD: Tensor, q_TD: Tensor, step: StepAngles, cache: LayerCache, rows: PagedRows
    ) -> ChosenKeys | None:
        """The positions that rows attend to, ``None``: all; given normed rows, and what queries are projected from."""
        return None


class DeepseekForCausalLM(Decoder):
    """DeepSeekMoE (arXiv 2401.06066), DeepSeek-OCR's and the smallest DeepSeek-VL2's text part: V2's experts, and
    Llama's attention."""

    @classmethod
    def read_config(cls, keys: ConfigKeys, max_len: int | None) -> DecoderConfig:
        keys.must_be({"use_mla": (False,)})
        keys.pass_over(*LATENT_KEYS)
        given = {key: value for key, value in keys.values.items() if key not in LATENT_KEYS}
        return with_experts(keys, read_decoder(keys.over(given), max_len, windows=NO_WINDOWS), "softmax")


class DeepseekV2ForCausalLM(Decoder):
    layer_class = DeepseekLayer

    @classmethod
    def read_config(cls, keys: ConfigKeys, max_len: int | None) -> DecoderConfig:
        return read_deepseek(keys, max_len, "softmax")


class DeepseekV3ForCausalLM(DeepseekV2ForCausalLM):
    @classmethod
    def read_config(cls, keys: ConfigKeys, max_len: int | None) -> DecoderConfig:
        return read_deepseek(keys, max_len, "sigmoid")


class YoutuForCausalLM(DeepseekV2ForCausalLM):
    """Youtu-LLM (arXiv 2512.24618): latent attention, and no experts."""

    @classmethod
    def read_config(cls, keys: ConfigKeys, max_len: int | None) -> DecoderConfig:
        tied = keys.flag("tie_word_embeddings", True)
        keys.pass_over("qk_head_dim", "embedding_initializer_range")
        return dataclasses.replace(read_latent(keys, max_len), tie_word_embeddings=tied)


class AXK1Layer(DeepseekLayer):
    def feed_forward(self, config: DecoderConfig, weights: WeightLoader, prefix: str, index: int) -> FeedForward:
        after = "post_mlp_layernorm"
        if isinstance(config.layers[index].mlp, ExpertsPart):
            config = dataclasses.replace(config, names=config.names._replace(after_mlp=after))
        else:  # checkpoints have it, and the model does not use it
            weights.tensors.leave_out(f"{prefix}.{after}.")
        return super().feed_forward(config, weights, prefix, index)


class AXK1ForCausalLM(DeepseekV3ForCausalLM):
    """A.X K1 (SK Telecom): DeepSeek-V3 with a norm of what experts give."""

    layer_class = AXK1Layer

    @classmethod
    def read_config(cls, keys: ConfigKeys, max_len: int | None) -> DecoderConfig:
        given = {key: value for key, value in keys.values.items() if value is not None}
        return super().read_config(keys.over({"first_k_dense_replace": 1, **given}), max_len)
