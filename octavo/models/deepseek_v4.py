"""DeepSeek-V4: windows, and entries for groups of earlier tokens; several residual streams; experts fixed by tokens.

A layer attends to a window and, unless it is one of ``sliding_attention``, to compressed entries: of groups of 128
tokens to all (``heavily_compressed_attention``), of overlapping groups of 4 to those that an indexer chooses
(``compressed_sparse_attention``). ``ops.compressed_attention`` has the formulas, ``ops.hyper_connections`` those of
the streams. One head of keys, which are values too, serves all queries; so the rotation is undone in the results, which
groups of heads map to fewer numbers before the output projection.

Shapes: T tokens of the step, R rows whose logits are needed, D model, N heads, H head dim, O groups of heads, S
streams, X = S D, J heads of the indexer, I their width.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp
from typing import Any

import torch
from torch import Tensor

from octavo import ops
from octavo.layers.attention_inputs import StepAngles
from octavo.layers.moe import MoE
from octavo.models.config_keys import ConfigKeys, wrong
from octavo.models.decoder import NO_WINDOWS, Decoder, read_decoder
from octavo.models.decoder_layer import DecoderLayer
from octavo.models.layer_cache import LayerCacheSpec
from octavo.models.linear_parts import MatrixRows
from octavo.models.loader import WeightLoader
from octavo.models.moe_config import read_experts
from octavo.models.parts import DecoderConfig, ExpertsPart
from octavo.ops.attention.attention import LayerCache, PagedRows
from octavo.ops.attention.choose_keys import MOST_SCORES
from octavo.ops.attention.compressed_attention import Compression
from octavo.ops.hyper_connections import StreamMaps
from octavo.ops.linear.linear import head_linear
from octavo.ops.moe import CappedSwish, Routing
from octavo.quant.stored.shard import Section

WINDOW, SPARSE, HEAVY = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
KINDS_BY_RATE = {0: WINDOW, 4: SPARSE, 128: HEAVY}
"""By the ``compress_ratios`` of published configurations."""
MAIN, COMPRESSED = 0, 1
"""Which rotary embedding layers have without entries, and with them."""


DEFAULTS = {
    "vocab_size": 129_280,
    "hidden_size": 4096,
    "num_hidden_layers": 43,
    "num_attention_heads": 64,
    "head_dim": 512,
    "n_routed_experts": 256,
    "sliding_window": 128,
    "max_position_embeddings": 1_048_576,
    "eos_token_id": 1,
}
"""Of keys that a configuration leaves out, besides those of this family alone."""


@dataclass(frozen=True, kw_only=True)
class DeepseekV4Config(DecoderConfig):
    kinds: tuple[str, ...]
    """Of each layer."""
    rates: Mapping[str, int]
    """Tokens of a group, by the kind of the layer."""
    window: int
    query_rank: int
    num_groups: int
    """O"""
    output_rank: int
    """What each group of heads maps to."""
    index_heads: int
    index_dim: int
    index_count: int
    """Entries that the indexer chooses."""
    num_streams: int
    iterations: int
    stream_constant: float
    fixed: tuple[bool, ...]
    """Whether a layer's experts are fixed by tokens."""

    def parts(self, layer: int) -> tuple[int, ...]:
        """Widths of the parts of this layer's entries: attention's, and the indexer's if it has one."""
        return {WINDOW: (), HEAVY: (self.head_dim,), SPARSE: (self.head_dim, self.index_dim)}[self.kinds[layer]]

    @property
    def cache(self) -> tuple[LayerCacheSpec, ...]:
        """The keys of each layer's window; then, of each layer with entries, what tokens give to those of groups that
        may be incomplete, and the entries."""
        found = [LayerCacheSpec(1, self.head_dim, self.window, kind="latent")] * self.num_layers
        for i, kind in enumerate(self.kinds):
            if parts := self.parts(i):
                rate, span = self.rates[kind], 1 + (kind == SPARSE)
                found.append(LayerCacheSpec(1, 2 * span * sum(parts), span * rate, kind="latent", beside=i))
                found.append(LayerCacheSpec(1, sum(parts), kind="latent", beside=i, rate=rate))
        return tuple(found)

    @property
    def has_stages(self) -> bool:
        return False

    @property
    def num_output_groups(self) -> int:
        return self.num_groups

    def expanded_bytes(self, longest: int, num_tokens: int, itemsize: int, num_ranks: int) -> int:
        """Of the ranks of entries, which indexers compute for some rows at once, and of those that they choose."""
        if SPARSE not in self.kinds:
            return 0
        return 8 * max(MOST_SCORES, longest // self.rates[SPARSE]) + 4 * num_tokens * self.index_count


class Streams:
    """How a part of a layer gets its input from the streams, and how its result is added."""

    def __init__(self, config: DeepseekV4Config, weights: WeightLoader, name: str, num_maps: int = 3) -> None:
        S = config.num_streams
        rows, names = (S * (S + 2), ("fn", "base", "scale")) if num_maps == 3 else (S, ("hc_fn", "hc_base", "hc_scale"))
        self.maps = StreamMaps(
            weights.exact(f"{name}.{names[0]}", rows, S * config.hidden_size),
            weights.exact(f"{name}.{names[1]}", rows),
            weights.exact(f"{name}.{names[2]}", num_maps),
            *(S, config.iterations, config.stream_constant, config.norm_eps),
        )


class DeepseekV4Layer(DecoderLayer):
    def __init__(self, config: DeepseekV4Config, weights: WeightLoader, prefix: str, index: int) -> None:
        super().__init__(config, weights, prefix, index)
        self.attention_streams = Streams(config, weights, f"{prefix}.attn_hc")
        self.mlp_streams = Streams(config, weights, f"{prefix}.ffn_hc")
        assert isinstance(self.mlp, MoE)
        self.mixture_of: MoE = self.mlp
        self.mixture_of.after = _without_residual
        self.experts_VS: Tensor | None = None
        if config.fixed[index]:
            moe = self.mlp.router.routing
            name, num_experts = f"{prefix}.mlp.gate.tid2eid", len(self.mlp.router.weight_XD)
            self.experts_VS = _experts_of_tokens(weights, name, config.vocab_size, moe.num_chosen, num_experts)

    def load_mixer(self, config: DecoderConfig, weights: WeightLoader, prefix: str, index: int) -> None:
        assert isinstance(config, DeepseekV4Config)
        D, N, H, rank = config.hidden_size, config.num_heads, config.head_dim, config.query_rank
        name, kind, groups = f"{prefix}.self_attn", config.kinds[index], config.num_groups
        self.rope = self.part.rope or MAIN
        self.q_a_proj = weights.replicated(f"{name}.q_a_proj", rank, D)
        self.q_a_norm = weights.norm(f"{name}.q_a_norm", rank, config.norm_eps)
        self.q_proj = weights.column(f"{name}.q_b_proj", N * H, rank, num_heads=N)
        self.kv_proj = weights.replicated(f"{name}.kv_proj", H, D)
        self.kv_norm = weights.norm(f"{name}.kv_norm", H, config.norm_eps)
        self.heads = weights.own_heads(self.head_layout(config, weights, prefix, self.part))
        map_NK = weights.matrix(f"{name}.o_a_proj", groups * config.output_rank, N * H // groups, num_heads=groups)
        self.group_map_ORK = map_NK.view(-1, config.output_rank, N * H // groups)
        self.o_proj = weights.row(f"{name}.o_b_proj", D, groups * config.output_rank)
        self.compression: Compression | None = None
        if parts := config.parts(index):
            self._load_compression(config, weights, f"{name}.compressor", kind, parts)
        self.index_count = config.index_count if kind == SPARSE else 0
        if self.index_count:
            indexer, J = f"{name}.compressor.indexer", config.index_heads
            self.index_proj = weights.replicated(f"{indexer}.q_b_proj", J * config.index_dim, rank)
            self.index_weights = weights.replicated(f"{indexer}.scorer.weights_proj", J, D)
            self.index_scale, self.index_dim = (J * config.index_dim) ** -0.5, config.index_dim

    def _load_compression(
        self, config: DeepseekV4Config, weights: WeightLoader, name: str, kind: str, parts: Sequence[int]
    ) -> None:
        rate, overlaps, names = config.rates[kind], kind == SPARSE, (name, f"{name}.indexer")[: len(parts)]
        widths = [width * (1 + overlaps) for width in parts]
        maps = [
            MatrixRows(f"{module}.{part}_proj", [Section(width, 1)])
            for part in ("kv", "gate")
            for module, width in zip(names, widths, strict=True)
        ]
        self.compressor_proj = weights.fused(maps, config.hidden_size)
        self.compression = Compression(
            rate,
            overlaps,
            tuple(
                weights.exact(f"{module}.position_bias", rate, width)
                for module, width in zip(names, widths, strict=True)
            ),
            tuple(
                weights.norm(f"{module}.kv_norm", width, config.norm_eps).weight_D
                for module, width in zip(names, parts, strict=True)
            ),
            config.norm_eps,
        )
        self.entry_angles = 2 + sorted({config.rates[own] for own in config.kinds if own != WINDOW}).index(rate)

    def __call__(self, x_TX: Tensor, step: StepAngles, cache: LayerCache, rows: PagedRows) -> Tensor:
        """The next streams side by side, [T, S D], or [R, S D] with logits indices."""
        h_TD, post_TS, mix_TSS = ops.enter_streams(x_TX, self.attention_streams.maps)
        mixed_TN, x_TX = rows.pick(self.mix(h_TD, step, cache, rows), x_TX)
        post_TS, mix_TX = rows.pick(post_TS, mix_TSS.flatten(1))
        x_TX = ops.leave_streams(self.o_proj(mixed_TN), x_TX, post_TS, mix_TX.view(-1, *mix_TSS.shape[1:]))
        h_TD, post_TS, mix_TSS = ops.enter_streams(x_TX, self.mlp_streams.maps)
        fixed_TS = None
        if self.experts_VS is not None:
            assert step.token_ids_T is not None
            ids_T = step.token_ids_T if rows.logits_indices_R is None else step.token_ids_T[rows.logits_indices_R]
            fixed_TS = self.experts_VS[ids_T]
        return ops.leave_streams(self.mixture_of(h_TD, fixed_TS), x_TX, post_TS, mix_TSS)

    def mix(self, x_TD: Tensor, step: StepAngles, cache: LayerCache, rows: PagedRows) -> Tensor:
        """What groups of heads make of attention's results, [T, O numbers of a group]."""
        h_TD, eps, H = self.input_norm(x_TD), self.input_norm.eps, self.heads.head_dim
        cos_TR, sin_TR = step.angles[self.rope]
        low_TK = self.q_a_norm(self.q_a_proj(h_TD))
        q_TNH = ops.turn_tails(self.q_proj(low_TK).view(len(x_TD), -1, H), cos_TR, sin_TR, eps=eps)
        kv_T1H = self.kv_proj(h_TD).unsqueeze(1)
        kv_T1H = ops.turn_tails(kv_T1H, cos_TR, sin_TR, eps=eps, norm_H=self.kv_norm.weight_D)
        ops.store_kv(kv_T1H, kv_T1H, cache.keys, cache.values, rows.of(cache).slot_mapping_T)
        entries, rate, chosen_TE = None, 0, None
        if self.compression is not None:
            inputs, entries = cache.beside
            rate, angles = self.compression.rate, step.angles[self.entry_angles]
            ops.compress(self.compressor_proj(h_TD), self.compression, *angles, inputs, entries, rows)
            if self.index_count:
                index_TJI = self.index_proj(low_TK).view(len(x_TD), -1, self.index_dim)
                index_TJI = ops.turn_tails(index_TJI, cos_TR, sin_TR)
                weights_TJ = self.index_weights(h_TD).float() * self.index_scale
                chosen_TE = ops.choose_entries(
                    index_TJI, weights_TJ, rate, self.index_count, cache.keys.shape[2], entries, rows
                )
        out_TNH = ops.compressed_attention(q_TNH, self.heads, cache, rows, entries, rate, chosen_TE)
        out_TNH = ops.turn_tails(out_TNH, cos_TR, sin_TR, turns_back=True)
        return head_linear(out_TNH.view(len(x_TD), len(self.group_map_ORK), -1), self.group_map_ORK).flatten(1)


def _experts_of_tokens(weights: WeightLoader, name: str, num_tokens: int, num_chosen: int, num_experts: int) -> Tensor:
    """The experts that each token has, int64 [V, S]; of random weights, the next ones for each."""
    tensors = weights.tensors
    if tensors.is_dummy:
        numbers = torch.arange(num_tokens * num_chosen).view(num_tokens, num_chosen) % num_experts
    else:  # a trainer may send floats
        stored = tensors.typed(name, (num_tokens, num_chosen), torch.int64, torch.int32, torch.float32)
        numbers = stored.long()
    tensors.check(
        (numbers >= 0) & (numbers < num_experts), f"tensor {name} has numbers that are not below {num_experts}"
    )
    kept: Tensor = weights.kept(numbers.to(weights.form.device))
    return kept


def _without_residual(y_TD: Tensor, x_TD: Tensor) -> Tensor:
    """What a mixture of experts gives: its input is no stream."""
    return y_TD


class DeepseekV4ForCausalLM(Decoder):
    layer_class = DeepseekV4Layer
    config: DeepseekV4Config

    @classmethod
    def read_config(cls, keys: ConfigKeys, max_len: int | None) -> DeepseekV4Config:
        return _read_config(keys, max_len)

    @staticmethod
    def own_name(name: str) -> str:
        """What the library calls a tensor of a published checkpoint, or of one that the library has written."""
        for pattern, own in PUBLISHED_NAMES:
            name = pattern.sub(own, name)
        return name

    def __init__(self, config: DeepseekV4Config, weights: WeightLoader) -> None:
        super().__init__(config, weights)
        self.last = Streams(config, weights, "model.hc_head", num_maps=1)
        weights.tensors.leave_out("mtp.", "model.mtp.")

    def embedded(self, token_ids_T: Tensor, positions_T: Tensor) -> Tensor:
        return super().embedded(token_ids_T, positions_T).repeat(1, self.config.num_streams)

    def step(self, token_ids_T: Tensor, positions_T: Tensor, x_TD: Tensor, rows: PagedRows) -> StepAngles:
        """The angles of each row, then those of the first positions of the groups that rows may complete."""
        of_rows = super().step(token_ids_T, positions_T, x_TD, rows)
        rates = sorted({self.config.rates[kind] for kind in self.config.kinds if kind != WINDOW})
        starts = [self.rotaries[COMPRESSED]((positions_T - rate + 1).clamp(min=0)) for rate in rates]
        return of_rows._replace(angles=(*of_rows.angles, *starts), token_ids_T=token_ids_T)

    def merged(self, x_RX: Tensor) -> Tensor:
        return ops.last_streams(x_RX, self.last.maps)


PUBLISHED_NAMES = [
    (re.compile(pattern), own)
    for pattern, own in (
        (r"^embed\.", "model.embed_tokens."),
        (r"^head\.", "lm_head."),
        (r"^(?=layers\.|norm\.|hc_head)", "model."),
        (r"^model\.hc_head_", "model.hc_head.hc_"),
        (r"\.hc_(attn|ffn)_", r".\1_hc."),
        (r"\.attn_norm\.", ".input_layernorm."),
        (r"\.ffn_norm\.", ".post_attention_layernorm."),
        (r"\.attn\.", ".self_attn."),
        (r"\.ffn\.", ".mlp."),
        (r"\.indexer\.compressor\.", ".compressor.indexer."),
        (r"\.self_attn\.indexer\.", ".self_attn.compressor.indexer."),
        (r"\.indexer\.weights_proj\.", ".indexer.scorer.weights_proj."),
        (r"\.attn_sink$", ".sinks"),
        (r"\.ape$", ".position_bias"),
        (r"\.(self_attn|compressor|indexer)\.norm\.", r".\1.kv_norm."),
        (r"\.q_norm\.", ".q_a_norm."),
        (r"\.w(q_a|q_b|kv|gate|o_a|o_b)\.", r".\1_proj."),
        (r"\.gate\.bias$", ".gate.e_score_correction_bias"),
        (r"\.w1\.", ".gate_proj."),
        (r"\.w2\.", ".down_proj."),
        (r"\.w3\.", ".up_proj."),
        (r"(_proj)\.scale$", r"\1.weight_scale_inv"),
    )
]
"""What stands in names of published checkpoints, and what it is in those of the library, one after the other."""


def _kinds(keys: ConfigKeys, count: int) -> tuple[str, ...]:
    """The kind of each layer."""
    kinds, ratios = keys.choices("layer_types", (WINDOW, SPARSE, HEAVY), count), keys.get("compress_ratios")
    if kinds is not None:
        return kinds
    if ratios is None:
        return tuple(SPARSE if i > 2 and i % 2 else HEAVY for i in range(count))
    if not isinstance(ratios, list | tuple) or len(ratios) < count or not all(r in KINDS_BY_RATE for r in ratios):
        raise wrong("compress_ratios", ratios, f"a list of at least {count}, each one of 0, 4 and 128")
    return tuple(KINDS_BY_RATE[ratio] for ratio in ratios[:count])


def _rates(keys: ConfigKeys) -> dict[str, int]:
    given = keys.child("compress_rates") or ConfigKeys({})
    old = {SPARSE: "compress_rate_csa", HEAVY: "compress_rate_hca"}
    defaults = {kind: given.size(kind, rate) for rate, kind in KINDS_BY_RATE.items() if rate}
    return {kind: keys.size(old[kind], rate) for kind, rate in defaults.items()}


def _ropes(keys: ConfigKeys, head_dim: int) -> tuple[int, list[dict[str, Any]]]:
    """The width of the rotated part of a head, and the rotary keys of layers without entries and with them."""
    given = dict(keys.get("rope_parameters") or keys.get("rope_scaling") or {})
    keys.pass_over("rope_scaling")
    factor = keys.get("partial_rotary_factor")
    width = int(head_dim * factor) if isinstance(factor, int | float) and 0 < factor <= 1 else None
    width = keys.size("qk_rope_head_dim", head_dim // 8 if width is None else width, low=2)
    if width > head_dim or width % 2:
        raise wrong("qk_rope_head_dim", width, f"an even number of at most head_dim, {head_dim}")
    if not (isinstance(given.get("main"), Mapping) and isinstance(given.get("compress"), Mapping)):
        thetas = [keys.number(key, default) for key, default in (("rope_theta", 1e4), ("compress_rope_theta", 1.6e5))]
        scaling = {key: value for key, value in given.items() if key not in ("main", "compress")}
        given = {"main": {"rope_theta": thetas[0]}, "compress": {**scaling, "rope_theta": thetas[1]}}
    keys.pass_over("rope_theta", "compress_rope_theta")
    found = [{key: value for key, value in given[name].items() if value is not None} for name in ("main", "compress")]
    for own in found:
        own.pop("partial_rotary_factor", None)
        kind = own.get("rope_type", own.get("type"))
        if kind in ("dynamic", "longrope"):
            raise wrong("rope_type", kind, "one of default, linear, llama3, yarn, as entries stay in the cache")
        if kind == "yarn":
            own.setdefault("attention_factor", 1.0)
    return width, found


def _experts(keys: ConfigKeys, config: DecoderConfig) -> tuple[list[ExpertsPart], tuple[bool, ...]]:
    """The experts of each layer, and whether they are fixed by tokens."""
    count, limit = config.num_layers, keys.number("swiglu_limit", 10.0)
    types = keys.choices("mlp_layer_types", ("hash_moe", "moe"), count)
    num_fixed = keys.size("num_hash_layers", 3, low=0)
    fixed = tuple(i < num_fixed if types is None else types[i] == "hash_moe" for i in range(count))
    keys.choice("hidden_act", {"silu": None}, "silu")
    keys.must_be({"norm_topk_prob": (True,), "n_shared_experts": (1,), "mlp_bias": (False,)})
    activation = CappedSwish(limit, limit / (1 + exp(-limit)))
    size = keys.size("moe_intermediate_size", 2048)
    moe = read_experts(
        keys,
        config,
        count_keys=("n_routed_experts", "num_local_experts"),
        num_chosen=6,
        expert_size=size,
        normalises=True,
        shared_size=size,
    )
    moe = dataclasses.replace(moe, activation=activation)
    scorings = {name: name for name in ("sqrtsoftplus", "sigmoid", "softmax")}
    scoring: Any = keys.choice("scoring_func", scorings, "sqrtsoftplus")
    routing = Routing(moe.num_chosen, True, scoring, keys.number("routed_scaling_factor", 1.5))
    free = ExpertsPart(
        moe=moe, routing=routing, correction="mlp.gate.e_score_correction_bias", shared_activation=activation
    )
    return [dataclasses.replace(free, correction=None) if own else free for own in fixed], fixed


def _read_config(keys: ConfigKeys, max_len: int | None) -> DeepseekV4Config:
    keys.must_be({"attention_bias": (False,)})
    keys.pass_over(
        "num_key_value_heads", "num_nextn_predict_layers", "n_group", "topk_group", "topk_method", "expert_dtype"
    )
    given = {key: value for key, value in keys.values.items() if value is not None}
    keys = keys.over({**DEFAULTS, **given, "num_key_value_heads": 1})
    ffn_size = keys.size("moe_intermediate_size", 2048)
    rotated, (main, compress) = _ropes(keys, keys.size("head_dim"))
    config = read_decoder(
        keys, max_len, rope={**main, "partial_rotary_factor": 1.0}, ffn_size=ffn_size, windows=NO_WINDOWS
    )
    N, count, window = config.num_heads, config.num_layers, keys.size("sliding_window")
    kinds, groups = _kinds(keys, count), keys.size("o_groups", 8)
    if N % groups:
        raise wrong("o_groups", groups, f"a divisor of num_attention_heads, {N}")
    index_dim = keys.size("index_head_dim", 128)
    if SPARSE in kinds and index_dim < rotated:
        raise wrong("index_head_dim", index_dim, f"at least as many numbers as are rotated, {rotated}")
    ropes = [MAIN if kind == WINDOW else COMPRESSED for kind in kinds]
    config = config.with_attention(num_kv_heads=1, window=window, has_sinks=True, rope=ropes, is_adjacent=True)
    parts, fixed = _experts(keys, config)
    config = config.with_mlps(lambda i: parts[i])
    config = dataclasses.replace(config, ropes=tuple(config.rope(own, max_len, rotated) for own in (main, compress)))
    return config.extended(
        DeepseekV4Config,
        kinds=kinds,
        rates=_rates(keys),
        window=window,
        query_rank=keys.size("q_lora_rank", 1024),
        num_groups=groups,
        output_rank=keys.size("o_lora_rank", 1024),
        index_heads=keys.size("index_n_heads", 64),
        index_dim=index_dim,
        index_count=keys.size("index_topk", 512),
        num_streams=keys.size("hc_mult", 4, low=2),
        iterations=keys.size("hc_sinkhorn_iters", 20),
        stream_constant=keys.number("hc_eps", 1e-6),
        fixed=fixed,
    )
