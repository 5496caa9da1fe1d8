"""MiniMax M3 (2026), the text part: in most layers each kv head attends to blocks that an indexer chose for it.

Experts are chosen by sigmoids; their gates, and those of dense layers, are clamped. Norms multiply by one plus their
weights.

Shapes: T tokens of the step, D model, K kv heads, G query heads that share one, H head dim, I width of an indexer's
keys.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import Tensor

from octavo import ops
from octavo.layers.attention_inputs import StepAngles
from octavo.layers.linear import Linear
from octavo.models.config_keys import ConfigKeys, wrong
from octavo.models.decoder import NO_WINDOWS, Decoder, read_decoder
from octavo.models.decoder_layer import DecoderLayer, FeedForward
from octavo.models.layer_cache import LayerCacheSpec
from octavo.models.linear_parts import MatrixRows
from octavo.models.loader import WeightLoader
from octavo.models.model_config import FULL
from octavo.models.moe_config import read_experts
from octavo.models.parts import DecoderConfig, ExpertsPart, HeadNorm, MLPPart, NormPart
from octavo.ops.attention.attention import LayerCache, PagedRows
from octavo.ops.attention.choose_head_blocks import HeadBlocks, attend_to_head_blocks
from octavo.ops.attention.choose_keys import MOST_SCORES, sees_all
from octavo.ops.linear.linear import Activation
from octavo.ops.moe import ClampedSwish, Routing
from octavo.quant.stored.shard import Section

SPARSE = "minimax_m3_sparse"
OLDER_KEYS = {
    "index_n_heads": "sparse_num_index_heads",
    "index_head_dim": "sparse_index_dim",
    "index_block_size": "sparse_block_size",
    "index_topk_blocks": "sparse_topk_blocks",
    "index_local_blocks": "sparse_local_block",
}
"""Keys of transformers, and those in ``sparse_attention_config`` of published configurations."""
PUBLISHED: dict[str, Any] = {
    "router": "block_sparse_moe.gate",
    "correction": "block_sparse_moe.e_score_correction_bias",
    "experts": "block_sparse_moe.experts",
    "projections": ("w1", "w3", "w2"),
    "stacked": None,
    "shared": ("block_sparse_moe.shared_experts.gate_proj", "block_sparse_moe.shared_experts.up_proj"),
    "shared_down": "block_sparse_moe.shared_experts.down_proj",
}
"""Names in ``ExpertsPart``; transformers has others."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MiniMaxM3Config(DecoderConfig):
    rule: HeadBlocks
    index_width: int
    """Width of an indexer's keys."""

    @property
    def dense_context(self) -> int:
        return self.rule.size * self.rule.most

    def expanded_bytes(self, longest: int, num_tokens: int, itemsize: int, num_ranks: int) -> int:
        """Of what blocks are worth, and their ranks."""
        return 8 * MOST_SCORES if longest > self.dense_context else 0


class MiniMaxM3Layer(DecoderLayer):
    def load_mixer(self, config: DecoderConfig, weights: WeightLoader, prefix: str, index: int) -> None:
        assert isinstance(config, MiniMaxM3Config)
        cache = config.layers[index].cache
        self.rule, self.index_width = config.rule, 0 if cache is None else cache.index_dim
        self.dense_context = config.dense_context
        super().load_mixer(config, weights, prefix, index)
        if self.index_width:
            names = (f"{self.index_name(weights, prefix)}{part}_norm.weight" for part in "qk")
            self.index_norms = [weights.norm_weight(name, self.index_width, 1.0) for name in names]

    @staticmethod
    def index_name(weights: WeightLoader, prefix: str) -> str:
        """How names of the indexer's weights begin."""
        published = f"{prefix}.self_attn.index_"
        return published if weights.tensors.has_module(f"{published}q_proj") else f"{prefix}.self_attn.indexer."

    def qkv(self, config: DecoderConfig, weights: WeightLoader, prefix: str) -> Linear:
        """Queries, keys and values side by side, behind them the indexer's queries and its key."""
        if not self.index_width:
            return super().qkv(config, weights, prefix)
        name, K, width = self.index_name(weights, prefix), self.part.num_kv_heads, self.index_width
        counts = self.part.num_heads, K, K
        parts = zip(config.names.queries, counts, strict=True)
        maps = [MatrixRows(f"{prefix}.{own}", [Section(n * self.part.head_dim, n)]) for own, n in parts]
        maps.append(MatrixRows(f"{name}q_proj", [Section(K * width, K)]))
        maps.append(MatrixRows(f"{name}k_proj", [Section(width, 1)]))
        return weights.fused(maps, config.hidden_size)

    def feed_forward(self, config: DecoderConfig, weights: WeightLoader, prefix: str, index: int) -> FeedForward:
        part, has = config.layers[index].mlp, weights.tensors.has_module
        if isinstance(part, MLPPart) and has(f"{prefix}.mlp.gate_up_proj"):
            config = dataclasses.replace(config, names=config.names._replace(ups=("mlp.gate_up_proj",)))
        if isinstance(part, ExpertsPart) and has(f"{prefix}.block_sparse_moe.gate"):
            published = dataclasses.replace(part, **PUBLISHED)
            config = config.with_mlps(lambda i: published if i == index else None)
        return super().feed_forward(config, weights, prefix, index)

    def attend(self, qkv_TW: Tensor, step: StepAngles, cache: LayerCache, rows: PagedRows) -> Tensor:
        if not self.index_width:
            return super().attend(qkv_TW, step, cache, rows)
        index, (cos_TR, sin_TR), heads = cache.index_keys, step.angles[0], self.heads
        assert index is not None
        qkv_TW, index_TW = qkv_TW.split_with_sizes([sum(heads.sizes), qkv_TW.shape[1] - sum(heads.sizes)], dim=1)
        qkv_TW, T, K, width = ops.concat(qkv_TW), len(qkv_TW), heads.num_kv_heads, self.index_width
        parts = zip(index_TW.split_with_sizes([K * width, width], dim=1), self.index_norms, strict=True)
        q_TKI, k_T1I = (
            ops.rms_norm(x.reshape(-1, width), norm, heads.norm_eps).view(T, -1, width) for x, norm in parts
        )
        q_TKI, k_T1I = ops.apply_rope(q_TKI, k_T1I, cos_TR, sin_TR)
        ops.store_kv(k_T1I, k_T1I, index, index, rows.of(cache).slot_mapping_T)
        if sees_all(cache, rows, self.dense_context):
            return super().attend(qkv_TW, step, cache, rows)
        ids_TKB = ops.choose_head_blocks(q_TKI, cache, rows, self.rule)
        return attend_to_head_blocks(qkv_TW, heads, (cos_TR, sin_TR), cache, rows, ids_TKB, self.rule.size)


class MiniMaxM3VLForCausalLM(Decoder):
    layer_class = MiniMaxM3Layer

    def __init__(self, config: DecoderConfig, weights: WeightLoader) -> None:
        weights.tensors.leave_out("mtp.", "model.mtp.", "language_model.mtp.")
        super().__init__(config, weights)

    @classmethod
    def read_config(cls, keys: ConfigKeys, max_len: int | None) -> DecoderConfig:
        """Keys are those of transformers, or those of published configurations."""
        count, older = keys.size("num_hidden_layers", 60), keys.child("sparse_attention_config") or ConfigKeys({})
        given = {own: older.get(key) for own, key in OLDER_KEYS.items() if older.get(key) is not None}
        keys = keys.over({**keys.values, **given})
        config = read_decoder(
            keys, max_len, head_dim=128, rotary=1.0, theta=5e6, activations=ANY, windows=NO_WINDOWS,
            norm=NormPart(offset=1.0), mlp_bias=False,
        )  # fmt: skip
        keys.pass_over("rotary_dim", "num_mtp_modules")
        activation = ClampedSwish(keys.number("swiglu_alpha", 1.702), keys.number("swiglu_limit", 7.0))
        kinds = _listed(keys, "layer_types", older, "sparse_attention_freq", (FULL, SPARSE), count, FULL)
        mlps = _listed(keys, "mlp_layer_types", keys, "moe_layer_freq", ("dense", "sparse"), count, "sparse")
        older.finish()
        dense = MLPPart(size=keys.size("dense_intermediate_size", 12288), activation=activation)
        moe = read_experts(
            keys,
            config,
            count_keys=("num_local_experts", "num_experts"),
            num_chosen=4,
            normalises=True,
            is_sparse=tuple(kind == "sparse" for kind in mlps),
            shared_size=keys.size("shared_intermediate_size", 3072),
            activation=activation,
            dense_size=dense.size,
        )
        part = ExpertsPart(
            moe=moe,
            routing=Routing(moe.num_chosen, True, "sigmoid", keys.number("routed_scaling_factor", 2.0)),
            correction="mlp.gate.e_score_correction_bias",
            stacked=("gate_up_proj", "down_proj"),
            shared=("mlp.shared_experts.gate_up_proj",),
        )
        config = config.with_mlps(lambda i: part if moe.is_sparse[i] else dense)
        config = config.with_attention(head_norm=HeadNorm(offset=1.0))
        return cls._with_indexers(keys, config, kinds)

    @classmethod
    def _with_indexers(cls, keys: ConfigKeys, config: DecoderConfig, kinds: tuple[str, ...]) -> MiniMaxM3Config:
        num_heads, width = keys.size("index_n_heads", 4), keys.size("index_head_dim", 128)
        blocks = keys.size("index_topk_blocks", 16)
        rule = HeadBlocks(keys.size("index_block_size", 128), blocks, keys.size("index_local_blocks", 1, low=0))
        if SPARSE in kinds and num_heads != config.num_kv_heads:
            raise wrong("index_n_heads", num_heads, f"num_key_value_heads, {config.num_kv_heads}")
        if width < config.ropes[0][1]:
            raise wrong("index_head_dim", width, f"at least as many numbers as are rotated, {config.ropes[0][1]}")
        if rule.local > blocks:
            raise wrong("index_local_blocks", rule.local, f"at most index_topk_blocks, {blocks}")
        cache = LayerCacheSpec(config.num_kv_heads, config.head_dim, index_dim=width)
        config = config.with_caches([cache if kind == SPARSE else None for kind in kinds])
        return config.extended(MiniMaxM3Config, rule=rule, index_width=width)


ANY: dict[str, Activation] = dict.fromkeys(("silu", "swigluoai"), "silu")
"""What ``hidden_act`` may be: the activation is always that of ``swiglu_alpha`` and ``swiglu_limit``."""


def _listed(
    keys: ConfigKeys, key: str, older: ConfigKeys, older_key: str, kinds: tuple[str, str], count: int, default: str
) -> tuple[str, ...]:
    """The kind of each layer: from a list of words, or an older one of zeros and ones."""
    found, flags = keys.choices(key, kinds, count), older.get(older_key)
    if found is not None or flags is None:
        return found or (default,) * count
    if not isinstance(flags, list | tuple) or len(flags) != count or not {*flags} <= {0, 1}:
        raise wrong(older_key, flags, f"a list of {count}, 1 for {kinds[1]}, else 0")
    return tuple(kinds[flag] for flag in flags)
