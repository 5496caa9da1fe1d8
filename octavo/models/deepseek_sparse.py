"""DeepSeek-V3.2 (arXiv 2512.02556), GLM-5 (arXiv 2602.15763), A.X K2: latent attention to what an indexer chose.

In GLM-5 an indexer's choice may be that of several layers (arXiv 2603.12201).

Shapes: T tokens of the step, D model, N heads of the indexer, W width of its keys, R rotated part of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from octavo import ops
from octavo.layers.attention_inputs import IndexerChoice, StepAngles
from octavo.layers.linear import Linear
from octavo.layers.norm import GatedRMSNorm, LayerNorm, Norm
from octavo.models.config_keys import ConfigKeys, wrong
from octavo.models.decoder import Decoder
from octavo.models.deepseek import DeepseekConfig, DeepseekLayer, read_deepseek
from octavo.models.linear_parts import MatrixRows
from octavo.models.loader import WeightLoader
from octavo.models.parts import DecoderConfig, ExpertsPart
from octavo.models.rope_keys import half_split_rows
from octavo.ops.attention.attention import LayerCache, PagedRows
from octavo.ops.attention.choose_keys import MOST_SCORES, ChosenKeys, sees_all
from octavo.quant.stored.shard import Section
from octavo.quant.stored.stored_weight import DenseWeight, Order

INDEX_EPS = 1e-6
FULL, SHARED = "full", "shared"
INDEXED = "indexed_attention"
"""The type of a layer that attends to what an indexer chose."""


@dataclasses.dataclass(frozen=True)
class IndexPart:
    """The indexers of a model."""

    num_heads: int
    width: int
    count: int
    """Positions that a row attends to, at most."""
    has_own: tuple[bool, ...]
    """Whether each layer has one, or takes what the one before it chose."""
    is_adjacent: bool = False
    """Whether rotated pairs are adjacent numbers."""
    rotates_last: bool = False
    """Whether the last numbers of a head are rotated, not the first."""
    eps: float = INDEX_EPS
    """Of the norm of keys."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SparseConfig(DeepseekConfig):
    index: IndexPart

    @property
    def has_stages(self) -> bool:
        return all(self.index.has_own)

    @property
    def dense_context(self) -> int:
        return self.index.count

    def expanded_bytes(self, longest: int, num_tokens: int, itemsize: int, num_ranks: int) -> int:
        """Of scores and a choice besides; keys are not expanded for contexts of which a part is attended to."""
        dense = super().expanded_bytes(min(longest, self.index.count), num_tokens, itemsize, num_ranks)
        if longest <= self.index.count:
            return dense
        return dense + 4 * (max(MOST_SCORES, longest) + num_tokens * self.index.count)

    def with_mtp(self) -> SparseConfig:
        """See ``DecoderConfig``; the layer has an indexer."""
        own, cache = super().with_mtp(), self.layers[0].cache
        assert cache is not None
        index = dataclasses.replace(self.index, has_own=(*self.index.has_own, True))
        last = dataclasses.replace(own.layers[-1], cache=cache)
        return dataclasses.replace(own, layers=(*own.layers[:-1], last), index=index)


def read_sparse(keys: ConfigKeys, config: DeepseekConfig, num_heads: int, **more: Any) -> SparseConfig:
    """With the indexers that the configuration has; ``num_heads`` is a default, ``more`` is for ``IndexPart``."""
    if not config.query_rank:
        raise wrong("q_lora_rank", None, "given, as indexers' queries are projected from so many numbers")
    index = IndexPart(
        keys.size("index_n_heads", num_heads),
        keys.size("index_head_dim", 128),
        keys.size("index_topk", 2048),
        **{"has_own": (True,) * config.num_layers, **more},
    )
    if index.width < config.rotated_size:
        raise wrong("index_head_dim", index.width, f"at least qk_rope_head_dim, {config.rotated_size}")
    keys.choices("layer_types", (INDEXED,), config.num_layers)
    caches = [part.cache for part in config.layers]
    own = [
        None if cache is None else dataclasses.replace(cache, index_dim=index.width if has_own else 0)
        for cache, has_own in zip(caches, index.has_own, strict=True)
    ]
    return config.with_caches(own).extended(SparseConfig, index=index)


class Indexer:
    """Chooses the positions that rows attend to: see ``ops.choose_keys``."""

    def __init__(self, config: SparseConfig, weights: WeightLoader, name: str) -> None:
        part, D, R = config.index, config.hidden_size, config.rotated_size
        N, W = part.num_heads, part.width
        query_order: Order | None = None
        key_order: Order | None = None
        if part.is_adjacent:
            query_order, key_order = (half_split_rows(n, W, R) for n in (N, 1))
        if part.rotates_last:
            query_order, key_order = (np.roll(np.arange(n * W).reshape(n, W), R, axis=1).ravel() for n in (N, 1))
        self.q_proj = weights.replicated(f"{name}.wq_b", N * W, config.query_rank, order=query_order)
        self.k_proj = weights.replicated(f"{name}.wk", W, D, order=key_order)
        self.k_norm = _ordered(weights.layer_norm(f"{name}.k_norm", W, part.eps), key_order)
        weight_ND = weights.router(f"{name}.weights_proj", N, D)
        self.dtype, self.weights_proj = weight_ND.dtype, Linear([DenseWeight(weight_ND)])
        self.width, self.count = W, part.count

    def __call__(
        self, h_TD: Tensor, queries_TN: Tensor, angles: tuple[Tensor, Tensor], cache: LayerCache, rows: PagedRows
    ) -> ChosenKeys | None:
        """Store the keys of normed rows, and choose for their ``queries``; ``None``: all positions."""
        index = cache.index_keys
        assert index is not None
        k_T1W = self.k_norm(self.k_proj(h_TD)).unsqueeze(1)
        q_TNW = queries_TN.view(len(h_TD), -1, self.width)
        q_TNW, k_T1W = ops.apply_rope(q_TNW, k_T1W, *angles)
        ops.store_kv(k_T1W, k_T1W, index, index, rows.of(cache).slot_mapping_T)
        if sees_all(cache, rows, self.count):
            return None
        weights_TN = self.weights_proj(h_TD.to(self.dtype)).float()
        return ops.choose_keys(q_TNW, weights_TN, cache, rows, self.count)


def _ordered(norm: LayerNorm, order: Order | None) -> LayerNorm:
    """With its numbers in the order of a map's rows."""
    if order is None:
        return norm
    return LayerNorm(norm.weight_D[np.asarray(order)], norm.bias_D[np.asarray(order)], norm.eps)


class SparseLayer(DeepseekLayer):
    def load_mixer(self, config: DecoderConfig, weights: WeightLoader, prefix: str, index: int) -> None:
        super().load_mixer(config, weights, prefix, index)
        assert isinstance(config, SparseConfig)
        name = f"{prefix}.{config.names.output.rpartition('.')[0]}.indexer"
        self.indexer = Indexer(config, weights, name) if config.index.has_own[index] else None
        if self.indexer is None:
            weights.tensors.leave_out(f"{name}.")

    def chosen(
        self, h_TD: Tensor, q_TD: Tensor, step: StepAngles, cache: LayerCache, rows: PagedRows
    ) -> ChosenKeys | None:
        assert step.choice is not None
        if self.indexer is not None:
            step.choice.keys = None  # is large, and none behind this layer attends to it
            queries_TN = self.indexer.q_proj(q_TD, norm=self.q_norm)
            step.choice.keys = self.indexer(h_TD, queries_TN, step.angles[0], cache, rows)
        return step.choice.keys


class DeepseekV32ForCausalLM(Decoder):
    layer_class = SparseLayer

    @classmethod
    def read_config(cls, keys: ConfigKeys, max_len: int | None) -> DecoderConfig:
        return read_sparse(keys, read_deepseek(keys, max_len, "sigmoid"), 64)

    def step(self, token_ids_T: Tensor, positions_T: Tensor, x_TD: Tensor, rows: PagedRows) -> StepAngles:
        return super().step(token_ids_T, positions_T, x_TD, rows)._replace(choice=IndexerChoice())


class GlmMoeDsaForCausalLM(DeepseekV32ForCausalLM):
    @classmethod
    def read_config(cls, keys: ConfigKeys, max_len: int | None) -> DecoderConfig:
        defaults: dict[str, Any] = {"n_group": 1, "topk_group": 1, "q_lora_rank": 2048, "v_head_dim": 256}
        defaults |= {"rms_norm_eps": 1e-5}
        given = {key: value for key, value in keys.values.items() if value is not None}
        own = keys.over({**defaults, **given})
        keys.must_be({"indexer_rope_interleave": (True,)})
        config = read_deepseek(own, max_len, "sigmoid")
        has_own = read_owners(keys, config.num_layers)
        return read_sparse(own, config, 32, has_own=has_own, is_adjacent=True)


class AXK2Layer(SparseLayer):
    """With gates of attention's outputs, which are projected with the queries from the same numbers, normed and not;
    and with gates of norms."""

    def __init__(self, config: DecoderConfig, weights: WeightLoader, prefix: str, index: int) -> None:
        self.has_experts = isinstance(config.layers[index].mlp, ExpertsPart)
        super().__init__(config, weights, prefix, index)

    def stream_norm(self, config: DecoderConfig, weights: WeightLoader, prefix: str, name: str | None) -> Norm | None:
        assert isinstance(config, AXK2Config)
        if name is None or (name == config.names.before_mlp and not self.has_experts):
            return super().stream_norm(config, weights, prefix, name)
        D, rank, name = config.hidden_size, config.gate_rank, f"{prefix}.{name}"
        maps = weights.replicated(f"{name}.W_down", rank, D), weights.replicated(f"{name}.W_up", D, rank)
        return GatedRMSNorm(weights.norm(f"{name}.norm", D, config.norm_eps), *maps)

    def load_queries(self, config: DeepseekConfig, weights: WeightLoader, name: str) -> None:
        N, P, R, V = config.num_heads, config.plain_size, config.rotated_size, config.value_size
        order = np.arange(N * (P + R))
        if self.part.is_adjacent:
            order = np.asarray(half_split_rows(N, P + R, R, first=P))
        heads, place = np.divmod(order, P + R)
        gates = (np.arange(N)[:, None] * (P + R + V) + P + R + np.arange(V)).reshape(-1)
        whole = np.concatenate((heads * (P + R + V) + place, gates))
        rows = MatrixRows(f"{name}.q_b_proj", [Section(N * (P + R), N), Section(N * V, N)], whole)
        self.q_proj = weights.fused([rows], 2 * config.query_rank)
        self.num_queries = weights.num_own(N) * (P + R)

    def queries(self, h_TD: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        q_TD = self.q_a_proj(h_TD)
        both_TW = self.q_proj(ops.concat(self.q_norm(q_TD), q_TD))
        q_TW, gates_TG = both_TW.tensor_split([self.num_queries], dim=1)
        return ops.concat(q_TW), q_TD, gates_TG


@dataclasses.dataclass(frozen=True, kw_only=True)
class AXK2Config(SparseConfig):
    gate_rank: int
    """Numbers between the two maps of a norm's gates."""


class AXK2ForCausalLM(DeepseekV32ForCausalLM):
    layer_class = AXK2Layer

    @classmethod
    def read_config(cls, keys: ConfigKeys, max_len: int | None) -> DecoderConfig:
        defaults: dict[str, Any] = {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 1}
        defaults |= {"q_lora_rank": 384, "kv_lora_rank": 128, "v_head_dim": 64}
        given = {key: value for key, value in keys.values.items() if value is not None}
        own = keys.over({**defaults, **given})
        own.must_be({"n_group": (1,)})  # its groups hide no expert from a token whose best ones have scores below zero
        config = read_sparse(own, read_deepseek(own, max_len, "sigmoid"), 16)
        return config.extended(AXK2Config, gate_rank=keys.size("gated_norm_rank", 16))


def read_owners(keys: ConfigKeys, num_layers: int, default: Sequence[bool] | None = None) -> tuple[bool, ...]:
    """Whether each layer has an indexer: by a list or a pattern of letters, by default every few layers from an offset
    on, if there is no other ``default``."""
    pattern = keys.get("index_topk_pattern")
    types = keys.choices("indexer_types", (FULL, SHARED), num_layers)
    every, offset = keys.size("index_topk_freq", 1), keys.size("index_skip_topk_offset", 2, low=0)
    if types is None and isinstance(pattern, str):
        types = tuple({"F": FULL, "S": SHARED}.get(letter, letter) for letter in pattern)
    if types is None and pattern is not None:
        types = tuple(pattern)
    if types is None and default is not None:
        types = tuple(FULL if has_own else SHARED for has_own in default)
    if types is None:
        types = tuple(SHARED if max(i - offset + 1, 0) % every else FULL for i in range(num_layers))
    if len(types) != num_layers or {*types} > {FULL, SHARED} or types[0] != FULL:
        raise wrong("index_topk_pattern", pattern, f"a letter F or S for each of {num_layers} layers, F for the first")
    return tuple(kind == FULL for kind in types)
