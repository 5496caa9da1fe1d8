"""Inkling 2 (Thinking Machines, 2026): Inkling with experts in every layer and attention to earlier blocks of layers.

The residual stream begins anew every few layers. Each part of a layer gets what learned queries find in the sums of
the blocks before and in the present one (``ops.attend_streams``); in layers without a window queries, keys and values
have one of their own each. Heads are limited to a length instead of normalised, each row has its own attention sinks
and gates, and convolutions of keys and values in layers without a window have weights of each token.

Shapes: T tokens of the step, R rows whose logits are needed, D model, X all blocks side by side and the present one,
S blocks, N heads, K kv heads, H head dim, P profiles, C channels, W width of convolutions.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from octavo import ops
from octavo.layers.attention import attention
from octavo.layers.attention_inputs import StepAngles, gated
from octavo.layers.moe import ExpertRouter, MoE
from octavo.models.config_keys import ConfigKeys
from octavo.models.decoder_layer import DecoderLayer
from octavo.models.inkling import KINDS, DistanceConfig, DistanceDecoder, other_names, read_distances
from octavo.models.layer_cache import conv_state
from octavo.models.linear_parts import MatrixRows
from octavo.models.loader import ExpertShape, WeightLoader
from octavo.models.moe_config import read_experts
from octavo.models.parts import DecoderConfig, ExpertsPart, Names
from octavo.ops.attention.attention import LayerCache, PagedRows
from octavo.ops.moe import Routing, Scoring, SoftcappedSwish
from octavo.quant.stored.shard import Section

NAMES = Names(before_attention=None, before_mlp=None)
SCORINGS: dict[str, Scoring] = {"sigmoid": "sigmoid", "sqrtsoftplus": "sqrtsoftplus"}
TURNS = ("w13", "w2")
"""Experts in published checkpoints: gates and ups, in turns; and downs."""
EPS = 1e-6


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inkling2Config(DistanceConfig):
    most_length: float
    """Of queries and keys of a head."""
    most_mix: float
    """Of the numbers by which a head mixes profiles."""
    layers_per_block: int

    @property
    def num_blocks(self) -> int:
        return -(-self.num_layers // self.layers_per_block)

    @property
    def has_stages(self) -> bool:
        return False  # between layers are all blocks

    @property
    def stream_size(self) -> int:
        return (self.num_blocks + 1) * self.hidden_size


class BlockAttention:
    """Normed inputs of a part of a layer: what its queries find in blocks, of the model's dtype."""

    def __init__(self, config: Inkling2Config, weights: WeightLoader, name: str | None, norms: Sequence[str]) -> None:
        """The part without queries, before which there is no block, gets the present one."""
        D, count = config.hidden_size, len(norms)
        self.queries_QD = None
        if name is not None:
            shape = (D,) if count == 1 else (count, D)
            self.queries_QD = weights.exact(f"{name}.query", *shape).view(count, D)
        self.norms = [(weights.exact(f"{norm}.weight", D), config.norm_eps) for norm in norms]

    def __call__(self, earlier_TSD: Tensor, present_TD: Tensor, dtype: torch.dtype) -> list[Tensor]:
        if self.queries_QD is None:
            found = [present_TD.float()] * len(self.norms)
        else:
            found = list(ops.attend_streams(earlier_TSD, present_TD, self.queries_QD, EPS))
        return [ops.rms_norm(x_TD, *norm).to(dtype) for x_TD, norm in zip(found, self.norms, strict=True)]


class AveragedConv:
    """``(x + conv(x)) / sqrt(W + 1)`` of each channel along its sequence."""

    def __init__(self, weights: WeightLoader, names: Sequence[str], section: Section, width: int) -> None:
        each = Section(section.num_rows * width, section.num_units)
        stored = [weights.exact_part(f"{name}.conv1d.weight", each).view(-1, width) for name in names]
        self.taps_WC = torch.cat(stored).t().contiguous()
        self.taps_WC[-1] += 1
        self.taps_WC /= math.sqrt(width + 1)

    def __call__(self, x_TC: Tensor, state: Tensor, rows: PagedRows) -> Tensor:
        return ops.causal_conv(x_TC, self.taps_WC, None, state, rows.states)


class TokenConv:
    """``(x + conv(x)) / sqrt(2 W + 1)`` with weights of each channel and, added, of each row and kv head."""

    def __init__(self, weights: WeightLoader, names: Sequence[str], config: Inkling2Config, section: Section) -> None:
        width, dtype = config.width, weights.form.dtype
        stored = [weights.exact_parts(f"{name}.static_weight", [section] * width).view(width, -1) for name in names]
        self.static_WC = torch.cat(stored, dim=1)  # the last input comes first
        channels = self.static_WC.shape[1]
        self.places_WC = torch.zeros(width, (width - 1) * channels, dtype=dtype, device=weights.form.device)
        for back in range(1, width):
            self.places_WC[width - 1 - back, (back - 1) * channels : back * channels] = 1

    def __call__(self, x_TC: Tensor, own_TKW: Tensor, state: Tensor, rows: PagedRows) -> Tensor:
        """``own``: the weights of rows, of the last input first."""
        (T, K, width), C = own_TKW.shape, x_TC.shape[1]
        earlier_TC = ops.causal_conv(x_TC.repeat(1, width - 1), self.places_WC, None, state, rows.states)
        sum_TKH = x_TC.float().view(T, K, C // K)
        for inputs_TC, static_C, own_TK in zip(
            (x_TC, *earlier_TC.chunk(width - 1, dim=1)), self.static_WC, own_TKW.float().unbind(2), strict=True
        ):
            weights_TKH = static_C.view(K, C // K) + own_TK.unsqueeze(2)
            sum_TKH = sum_TKH + weights_TKH * inputs_TC.float().view(T, K, C // K)
        return (sum_TKH / math.sqrt(2 * width + 1)).to(x_TC.dtype).flatten(1)


def limited(x_TNH: Tensor, most: float, scale_NH: Tensor | None = None) -> Tensor:
    """Each head, scaled, shortened to a length of ``most`` if it is longer; a new tensor."""
    wide_TNH = x_TNH.float() if scale_NH is None else x_TNH.float() * scale_NH
    lengths_TN1 = wide_TNH.square().sum(dim=2, keepdim=True).sqrt()
    return (wide_TNH * (most / (lengths_TN1 + EPS)).clamp(max=1)).to(x_TNH.dtype)


def _alone(y_TD: Tensor, x_TD: Tensor) -> Tensor:
    """What experts give: their input is no stream."""
    return y_TD


class Inkling2Layer(DecoderLayer):
    """Blocks are side by side, [T, X], the present one last; before the first layer x is that alone. All rows are
    computed in the last layer, too: what it adds depends on the rows before."""

    def __init__(self, config: Inkling2Config, weights: WeightLoader, prefix: str, index: int) -> None:
        super().__init__(config, weights, prefix, index)
        D, width = config.hidden_size, config.width
        self.most_length, self.most_mix, self.is_first = config.most_length, config.most_mix, index == 0
        self.num_columns, each = (config.num_blocks + 1) * D, config.layers_per_block
        self.num_before, self.begins = -(-index // each), index % each == 0
        norms = ["input_layernorm"] if self.slides else [f"{part}_input_layernorm" for part in "qkv"]
        name = None if self.is_first else f"{prefix}.attention_input"
        self.attention_input = BlockAttention(config, weights, name, [f"{prefix}.{norm}" for norm in norms])
        after = f"{prefix}.post_attention"
        self.mlp_input = BlockAttention(config, weights, f"{prefix}.mlp_input", [f"{after}_layernorm"])
        self.after = [
            AveragedConv(weights, [f"{prefix}.post_{part}_convolution"], Section(D, 1), width)
            for part in ("attention", "mlp")
        ]

    def load_mixer(self, config: DecoderConfig, weights: WeightLoader, prefix: str, index: int) -> None:
        assert isinstance(config, Inkling2Config)
        part, D, name, W = self.part, config.hidden_size, f"{prefix}.self_attn", config.width
        N, K, H, P = part.num_heads, part.num_kv_heads, part.head_dim, config.num_profiles
        self.heads = weights.own_heads(self.head_layout(config, weights, prefix, part))
        own_N, own_K = self.heads.num_heads, self.heads.num_kv_heads
        of_queries = {"q": (H, N), "r": (P, N), "gate": (H, N), "sink": (1, N)}
        maps = [MatrixRows(f"{name}.{map}_proj", [Section(n * size, n)]) for map, (size, n) in of_queries.items()]
        pairs = [[MatrixRows(f"{name}.{map}_proj", [Section(K * H, K)])] for map in "kv"]
        convs = [f"{name}.{map}_sconv" for map in "kv"]
        self.slides = config.slides[index]
        if self.slides:
            self.conv: AveragedConv | TokenConv = AveragedConv(weights, convs, Section(K * H, K), W)
            self.projections = [weights.fused([*maps, *pairs[0], *pairs[1]], D)]
        else:
            self.conv = TokenConv(weights, convs, config, Section(K * H, K))
            pairs = [
                [*pair, MatrixRows(f"{conv}.weight_proj", [Section(K * W, K)])]
                for pair, conv in zip(pairs, convs, strict=True)
            ]
            self.projections = [weights.fused(own, D) for own in (maps, *pairs)]
        self.sizes = [own_N * size for size, _ in of_queries.values()]
        self.q_scale_NH, self.mix_scale_NP = (
            weights.exact_part(f"{name}.{part}_l2_clip.scale", Section(N * size, N)).view(own_N, size)
            for part, size in (("q", H), ("rel", P))
        )
        self.profiles_EP = weights.dense(f"{name}.rel_logits_proj.proj", P, config.extents[index]).t().contiguous()
        self.v_norm = torch.ones(H, dtype=weights.form.dtype, device=weights.form.device), config.norm_eps
        self.own_kv = own_K * H
        self.o_proj = weights.row(f"{name}.o_proj", D, N * H)

    def feed_forward(self, config: DecoderConfig, weights: WeightLoader, prefix: str, index: int) -> MoE:
        """What experts give, without what they get. In published checkpoints gates and ups take turns."""
        part, D, name = config.layers[index].mlp, config.hidden_size, f"{prefix}.mlp"
        assert isinstance(part, ExpertsPart)
        X, F = part.moe.num_experts, part.moe.expert_size
        correction_X = weights.exact(f"{name}.gate.e_score_correction_bias", X)
        router_XD = weights.router(f"{name}.gate", X, D)
        order, names = np.arange(2 * F), ("gate_up_proj", "down_proj")
        if weights.tensors.has(f"{name}.experts.{TURNS[0]}"):
            order, names = order.reshape(F, 2).T.flatten(), TURNS
        shape = ExpertShape(X, D, F, part.moe.activation)
        experts = weights.stacked_experts(f"{name}.experts", shape, order, names=names, is_transposed=False)
        router = ExpertRouter(None, router_XD, part.routing._replace(correction_X=correction_X))
        return MoE(router, experts, None, weights.collective, _alone)

    def projected(self, inputs: list[Tensor], state: Tensor, rows: PagedRows) -> tuple[Tensor, Tensor]:
        """What is made of normed inputs: queries, mixes, gates and sinks side by side; and keys with values."""
        if isinstance(self.conv, AveragedConv):
            [given_TW] = (project(x_TD) for project, x_TD in zip(self.projections, inputs, strict=True))
            of_queries_TW, kv_TC = given_TW.split_with_sizes((sum(self.sizes), 2 * self.own_kv), dim=1)
            return of_queries_TW, self.conv(ops.concat(kv_TC), state, rows)
        of_queries_TW, *pairs = (project(x_TD) for project, x_TD in zip(self.projections, inputs, strict=True))
        (k_TC, k_own_TW), (v_TC, v_own_TW) = (pair_TW.tensor_split([self.own_kv], dim=1) for pair_TW in pairs)
        own_TKW = torch.cat((k_own_TW, v_own_TW), dim=1).view(len(k_TC), 2 * self.heads.num_kv_heads, -1)
        return of_queries_TW, self.conv(ops.concat(k_TC, v_TC), own_TKW, state, rows)

    def attended(self, inputs: list[Tensor], step: StepAngles, cache: LayerCache, rows: PagedRows) -> Tensor:
        """What attention makes of normed inputs, [T, N H]."""
        heads, T, H = self.heads, len(inputs[0]), self.heads.head_dim
        of_queries_TW, kv_TC = self.projected(inputs, cache.states[0], rows)
        q_TW, mix_TW, gates_TW, sinks_TN = of_queries_TW.split_with_sizes(self.sizes, dim=1)
        q_TNH = limited(q_TW.reshape(T, -1, H), self.most_length, self.q_scale_NH)
        mix_TNP = limited(mix_TW.reshape(T, heads.num_heads, -1), self.most_mix, self.mix_scale_NP)
        if not self.slides:
            assert step.query_scale_T1 is not None
            scale_T11 = step.query_scale_T1.unsqueeze(2)
            q_TNH, mix_TNP = ((x.float() * scale_T11).to(x.dtype) for x in (q_TNH, mix_TNP))
        k_TC, v_TC = kv_TC.chunk(2, dim=1)
        k_TKH = limited(k_TC.reshape(T, -1, H), self.most_length)
        v_TC = ops.rms_norm(v_TC.reshape(-1, H), *self.v_norm).view(T, -1)
        bias_TNE = ops.linear(mix_TNP.flatten(0, 1), self.profiles_EP).view(T, heads.num_heads, -1)
        own = heads._replace(bias_TNE=bias_TNE, sinks_N=sinks_TN.float().contiguous())
        qkv_TW = ops.concat(q_TNH.flatten(1), k_TKH.flatten(1), v_TC)
        return gated(gates_TW, attention(qkv_TW, own, None, None, cache, rows), "sigmoid")

    def __call__(self, x_TX: Tensor, step: StepAngles, cache: LayerCache, rows: PagedRows) -> Tensor:
        T, dtype, D = len(x_TX), x_TX.dtype, len(self.mlp_input.norms[0][0])
        if self.is_first:
            given_TD, x_TX = x_TX, x_TX.new_zeros(T, self.num_columns)
            x_TX[:, -D:] = given_TD
        blocks_TSD, present_TD = x_TX.view(T, -1, D), x_TX[:, -D:]
        inputs = self.attention_input(blocks_TSD[:, : self.num_before], present_TD, dtype)
        y_TD = self.after[0](self.o_proj(self.attended(inputs, step, cache, rows)), cache.states[1], rows).float()
        if self.begins:
            blocks_TSD[:, self.num_before] = present_TD
            num_before = self.num_before + 1
        else:
            y_TD, num_before = present_TD.float() + y_TD, self.num_before
        [h_TD] = self.mlp_input(blocks_TSD[:, :num_before], y_TD, dtype)
        x_TX[:, -D:] = y_TD + self.after[1](self.mlp(h_TD), cache.states[2], rows)
        return rows.pick(x_TX, x_TX)[0]


class Inkling2ForCausalLM(DistanceDecoder):
    layer_class: Any = Inkling2Layer
    config: Inkling2Config

    @classmethod
    def read_config(cls, keys: ConfigKeys, max_len: int | None) -> Inkling2Config:
        keys = keys.over({**keys.values, **other_names(keys)})
        size = keys.size("moe_intermediate_size", keys.get("intermediate_size") or 2304)
        keys = keys.over({**keys.values, "intermediate_size": size})
        count, window = keys.size("num_hidden_layers", 48), keys.size("sliding_window_size", 1024)
        kinds = keys.choices("layer_types", tuple(KINDS), count)
        kinds = kinds or tuple("hybrid_sliding" if (i + 1) % 6 else "hybrid" for i in range(count))
        keys.must_be({"tie_word_embeddings": (False,), "hidden_act": ("silu",)})
        keys.pass_over("number_of_conv_states", "sliding_window_size")
        growth = keys.number("log_scaling_alpha", 0.1), keys.number("log_scaling_n_floor", 128_000)
        config = read_distances(keys, max_len, kinds, window, growth)
        activation = SoftcappedSwish(keys.number("mlp_gate_softcap", 4.0), keys.number("mlp_up_softcap", 25.0))
        moe = read_experts(
            keys,
            config,
            count_keys=("n_routed_experts", "num_local_experts"),
            num_chosen=8,
            normalises=True,
            activation=activation,
        )
        scoring = keys.choice("scoring_func", SCORINGS, "sigmoid")
        routing = Routing(moe.num_chosen, True, scoring, keys.number("route_scale", 8.0))
        part = ExpertsPart(moe=moe, routing=routing)
        found = dataclasses.replace(config, names=NAMES, final_softcap=keys.number("final_logit_softcapping", 30.0))
        return _with_states(found.with_experts(part)).extended(
            Inkling2Config,
            most_length=keys.number("qk_l2_clip_threshold", 512**0.5),
            most_mix=keys.number("rel_l2_clip_threshold", 8.0),
            layers_per_block=keys.size("n_layers_per_attn_res_block", 6),
        )

    @staticmethod
    def own_name(name: str) -> str:
        """That of a weight in the library's checkpoints."""
        name = HEADLESS.sub("model.llm.", name)
        if found := QUERIES.match(name):
            return f"model.layers.{int(found[1]) + 1}.attention_input.query"
        for pattern, own in PUBLISHED_NAMES:
            name = pattern.sub(own, name)
        return name

    def __init__(self, config: Inkling2Config, weights: WeightLoader) -> None:
        super().__init__(config, weights)
        self.last_queries_1D = weights.exact("model.final_input.query", config.hidden_size).unsqueeze(0)

    def merged(self, x_RX: Tensor) -> Tensor:
        blocks_RSD = x_RX.view(len(x_RX), x_RX.shape[1] // self.config.hidden_size, self.config.hidden_size)
        found_1RD = ops.attend_streams(blocks_RSD[:, :-1], blocks_RSD[:, -1], self.last_queries_1D, EPS)
        return found_1RD[0].to(x_RX.dtype)


PUBLISHED_NAMES = [
    (re.compile(pattern), own)
    for pattern, own in (
        (r"^model\.llm\.unembed\.", "lm_head."),
        (r"^model\.llm\.", "model."),
        (r"^model\.embed\.", "model.embed_tokens."),
        (r"^model\.embed_norm\.", "model.embed_tokens.embed_norm."),
        (r"\.attn_res\.mlp_queries\.(\d+)$", r".layers.\1.mlp_input.query"),
        (r"\.attn_res\.output_query$", ".final_input.query"),
        (r"\.attn\.", ".self_attn."),
        (r"\.w([qkv])_d[uv]\.", r".\1_proj."),
        (r"\.wr_du\.", ".r_proj."),
        (r"\.wo_ud\.", ".o_proj."),
        (r"\.gate_attn\.", ".gate_proj."),
        (r"\.attn_sink_proj\.", ".sink_proj."),
        (r"\.attn_sconv\.", ".post_attention_convolution."),
        (r"\.mlp_sconv\.", ".post_mlp_convolution."),
        (r"(convolution|sconv)\.weight$", r"\1.conv1d.weight"),
        (r"\.static_w$", ".static_weight"),
        (r"\.weight_proj$", ".weight_proj.weight"),
        (r"\.mlp_norm\.", ".post_attention_layernorm."),
        (r"\.attn_norm\.", ".input_layernorm."),
        (r"\.([qkv])_input_norm\.", r".\1_input_layernorm."),
        (r"\.gate\.bias$", ".gate.e_score_correction_bias"),
        (r"\.experts\.(w13|w2)_weight_scale$", r".experts.\1_scale_inv"),
        (r"\.experts\.(w13|w2)_weight$", r".experts.\1"),
    )
]
"""What stands in names of published checkpoints, and what it is in those of the library, one after the other."""
HEADLESS = re.compile(r"^(?=(embed|embed_norm|layers|norm|attn_res)\.)")
"""Beginnings of names in a checkpoint without a head."""
QUERIES = re.compile(r"^model\.llm\.attn_res\.attn_queries\.(\d+)$")
"""Those of the second layer come first."""


def _with_states(config: DistanceConfig) -> DistanceConfig:
    """With what convolutions with weights of each token keep: their inputs once for each place."""
    caches = []
    for part, slides in zip(config.layers, config.slides, strict=True):
        cache, heads = part.cache, part.attention
        assert cache is not None
        if not slides:
            channels = 2 * heads.num_kv_heads * heads.head_dim * (config.width - 1)
            first = conv_state(config.width, channels, heads.num_kv_heads)
            cache = dataclasses.replace(cache, state=(first, *cache.state[1:]))
        caches.append(cache)
    return config.with_caches(caches)
