"""GLM-5.3-Flash (Z.ai, 2026), its text part: Kimi Delta Attention, and latent attention to blocks that are chosen.

The residual stream is several streams (``ops.hyper_connections``). No position is rotated. An indexer's key of a block
is a mean of those of its positions, weighted by gates of each number.

Shapes: T tokens of the step, R rows whose logits are needed, D model, S streams, X = S D, N heads of the indexer, W
width of its keys, B positions of a block.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from octavo import ops
from octavo.layers.attention_inputs import IndexerChoice, StepAngles
from octavo.layers.linear import Linear
from octavo.layers.mlp import MLP
from octavo.layers.moe import MoE
from octavo.layers.recurrent import KimiDelta
from octavo.models.config_keys import ONE_ACTIVATION, ConfigKeys, wrong
from octavo.models.decoder import Decoder
from octavo.models.deepseek import DeepseekConfig, DeepseekLayer, read_deepseek
from octavo.models.deepseek_sparse import INDEX_EPS, INDEXED, read_owners
from octavo.models.hybrid import LINEAR, HybridLayer, Recurrence
from octavo.models.kimi_linear import KimiLinearConfig, load_projected
from octavo.models.loader import WeightLoader
from octavo.models.model_config import FULL
from octavo.models.parts import DecoderConfig, ExpertsPart, MLPPart
from octavo.models.qwen3_next import DeltaSizes
from octavo.ops.attention.attention import LayerCache, PagedRows
from octavo.ops.attention.cached_rows import unpack_rows
from octavo.ops.attention.choose_blocks import RowPlaces, chosen_keys
from octavo.ops.attention.choose_keys import MOST_SCORES, ChosenKeys, sees_all
from octavo.ops.hyper_connections import StreamMaps
from octavo.ops.moe import CappedSwish
from octavo.quant.stored.shard import Section
from octavo.quant.stored.stored_weight import DenseWeight

DEFAULTS: dict[str, Any] = {
    "first_k_dense_replace": 3,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 256,
    "qk_rope_head_dim": 0,
    "rms_norm_eps": 1e-5,
    "v_head_dim": 256,
}


@dataclasses.dataclass(frozen=True)
class PooledIndex:
    """The indexers of a model."""

    num_heads: int
    width: int
    block: int
    """Positions of a block."""
    most: int
    """Blocks that a row attends to, at most."""
    has_own: tuple[bool, ...]
    """Whether each layer of latent attention has one, or takes what the one before it chose."""

    @property
    def dense_context(self) -> int:
        """Positions of the longest context of which all blocks are chosen."""
        return (self.most + 1) * self.block - 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Glm5NextConfig(KimiLinearConfig):
    index: PooledIndex
    lowest: float
    """The bound of the exponents of decays, 0: none."""
    num_streams: int
    iterations: int
    """Of the normalisation of mixed streams."""
    stream_constant: float

    @property
    def has_stages(self) -> bool:
        return False  # between layers are all streams

    @property
    def dense_context(self) -> int:
        return self.index.dense_context

    def expanded_bytes(self, longest: int, num_tokens: int, itemsize: int, num_ranks: int) -> int:
        """See ``SparseConfig``; what has scores are blocks, which are ranked in 64 bits."""
        part = self.index
        dense = super().expanded_bytes(min(longest, part.dense_context), num_tokens, itemsize, num_ranks)
        if longest <= part.dense_context:
            return dense
        return dense + 8 * max(MOST_SCORES, longest // part.block) + 4 * num_tokens * (part.most + 1) * part.block


class PooledIndexer:
    """Chooses the blocks that rows attend to; see ``ops.choose_blocks``."""

    def __init__(self, config: Glm5NextConfig, weights: WeightLoader, name: str) -> None:
        part, D = config.index, config.hidden_size
        self.part, N, width = part, part.num_heads, part.width
        self.q_proj = weights.replicated(f"{name}.wq_b", N * width, config.query_rank)
        self.k_proj = weights.replicated(f"{name}.wk", width, D)
        self.k_norm = weights.layer_norm(f"{name}.k_norm", width, INDEX_EPS)
        self.gate_proj = Linear([DenseWeight(weights.dense(f"{name}.index_kpool_compress_gate", width, D))])
        self.bias_BW = weights.exact(f"{name}.index_kpool_compress_ape", part.block, width)
        weight_ND = weights.router(f"{name}.weights_proj", N, D)
        self.dtype, self.weights_proj = weight_ND.dtype, Linear([DenseWeight(weight_ND)])

    def __call__(self, h_TD: Tensor, queries_TN: Tensor, cache: LayerCache, rows: PagedRows) -> ChosenKeys | None:
        """Store the keys of normed rows, and those of blocks that end; what each row attends to, ``None``: all."""
        part, T, index = self.part, len(h_TD), cache.index_keys
        assert index is not None
        entry_T1E = torch.cat((self.k_norm(self.k_proj(h_TD)), self.gate_proj(h_TD)), dim=1).unsqueeze(1)
        slots_T = rows.of(cache).slot_mapping_T
        ops.store_kv(entry_T1E, entry_T1E, index, index, slots_T)
        places = RowPlaces.of(cache, rows, T)
        is_last_T = (places.positions_T + 1) % part.block == 0
        back = torch.arange(1 - part.block, 1, device=h_TD.device)
        of_block_TB = places.slots((places.positions_T[:, None] + back).clamp_(min=0))
        entries_TBE = unpack_rows(index.flatten(0, 2)[of_block_TB], 2 * part.width)
        keys_TBW, gates_TBW = entries_TBE.to(h_TD.dtype).chunk(2, dim=2)
        shares_TBW = (gates_TBW.float() + self.bias_BW).softmax(dim=1).to(h_TD.dtype)
        pooled_TW = (shares_TBW * keys_TBW).sum(dim=1)
        pooled_T1E = torch.cat((pooled_TW, torch.zeros_like(pooled_TW)), dim=1).unsqueeze(1)
        ops.store_kv(pooled_T1E, pooled_T1E, index, index, slots_T.where(is_last_T, -1))
        if sees_all(cache, rows, part.dense_context):
            return None
        q_TNW = queries_TN.view(T, -1, part.width)
        weights_TN = self.weights_proj(h_TD.to(self.dtype)).float()
        q_TNE = torch.cat((q_TNW, torch.zeros_like(q_TNW)), dim=2)
        return chosen_keys(
            ops.choose_blocks(q_TNE, cache, rows, part.block, part.most, weights_TN), cache, rows, part.block, T
        )


class Glm5NextLayer(HybridLayer, DeepseekLayer):
    """Streams are side by side, [T, S D]."""

    def __init__(self, config: DecoderConfig, weights: WeightLoader, prefix: str, index: int) -> None:
        super().__init__(config, weights, prefix, index)
        assert isinstance(config, Glm5NextConfig)
        assert isinstance(self.mlp, MLP | MoE)
        self.mlp.after = _alone
        self.streams = [_stream_maps(config, weights, f"{prefix}.hc_{part}") for part in ("attn", "ffn")]

    def load_recurrence(self, config: DecoderConfig, weights: WeightLoader, prefix: str) -> Recurrence:
        assert isinstance(config, Glm5NextConfig)
        D, sizes, name = config.hidden_size, config.delta, f"{prefix}.self_attn"
        N, K = sizes.num_heads, sizes.key_dim
        narrow = dict.fromkeys(("f_a", "g_a"), Section(K, 1))
        projections, conv_WC, heads = load_projected(config, weights, name, narrow)
        decays, gates = (weights.column(f"{name}.{part}_b_proj", N * K, K, num_heads=N) for part in "fg")
        self.o_proj = weights.row(f"{name}.o_proj", D, sizes.values)
        heads = heads._replace(lowest=config.lowest)
        return KimiDelta(self.input_norm, projections, conv_WC, (decays, gates), K, heads)

    def load_mixer(self, config: DecoderConfig, weights: WeightLoader, prefix: str, index: int) -> None:
        super().load_mixer(config, weights, prefix, index)
        assert isinstance(config, Glm5NextConfig)
        self.indexer: PooledIndexer | None = None
        if self.recurrence is None and config.index.has_own[index]:
            self.indexer = PooledIndexer(config, weights, f"{prefix}.self_attn.indexer")

    def chosen(
        self, h_TD: Tensor, q_TD: Tensor, step: StepAngles, cache: LayerCache, rows: PagedRows
    ) -> ChosenKeys | None:
        assert step.choice is not None
        if self.indexer is not None:
            step.choice.keys = None  # is large, and none behind this layer attends to it
            step.choice.keys = self.indexer(h_TD, self.indexer.q_proj(q_TD, norm=self.q_norm), cache, rows)
        return step.choice.keys

    def __call__(self, x_TX: Tensor, step: StepAngles, cache: LayerCache, rows: PagedRows) -> Tensor:
        attention, mlp = self.streams
        h_TD, post_TS, mix_TSS = ops.enter_streams(x_TX, attention)
        mixed_TN, x_TX = rows.pick(self.mix(h_TD, step, cache, rows), x_TX)
        post_TS, mix_TX = rows.pick(post_TS, mix_TSS.flatten(1))
        x_TX = ops.leave_streams(self.o_proj(mixed_TN), x_TX, post_TS, mix_TX.view(-1, *mix_TSS.shape[1:]))
        h_TD, post_TS, mix_TSS = ops.enter_streams(x_TX, mlp)
        return ops.leave_streams(self.mlp(h_TD), x_TX, post_TS, mix_TSS)


def _alone(y_TD: Tensor, x_TD: Tensor) -> Tensor:
    """What a feed-forward layer gives: its input is no stream."""
    return y_TD


def _stream_maps(config: Glm5NextConfig, weights: WeightLoader, name: str) -> StreamMaps:
    S = config.num_streams
    return StreamMaps(
        weights.exact(f"{name}_fn", S * (S + 2), S * config.hidden_size),
        weights.exact(f"{name}_base", S * (S + 2)),
        weights.exact(f"{name}_scale", 3),
        *(S, config.iterations, config.stream_constant, config.norm_eps),
    )


class Glm5NextForCausalLM(Decoder):
    layer_class = Glm5NextLayer
    config: Glm5NextConfig

    @classmethod
    def read_config(cls, keys: ConfigKeys, max_len: int | None) -> DecoderConfig:
        count = keys.size("num_hidden_layers", 45)
        kinds = keys.choices("layer_types", (LINEAR, INDEXED, FULL), count)
        kinds = kinds or tuple(INDEXED if i % 4 == 3 else LINEAR for i in range(count))
        given = {key: value for key, value in keys.values.items() if value is not None and key != "layer_types"}
        own = keys.over({**DEFAULTS, **given, "head_dim": None})
        own.must_be({**ONE_ACTIVATION, "qk_rope_head_dim": (0,), "index_kpool_always_select_tail": (True,)})
        plain = read_deepseek(own, max_len, "sigmoid")
        keys.pass_over("head_dim", "rope_parameters", "rope_theta", "rope_scaling", "index_topk_freq")
        config = dataclasses.replace(_clamped(own, plain.without_rope()), latent_eps=plain.norm_eps)
        delta, lowest = _read_delta(keys)
        index = _read_index(keys, kinds)
        if not config.query_rank:
            raise wrong("q_lora_rank", None, "given, as indexers' queries are projected from so many numbers")
        latent = config.layers[0].cache
        assert latent is not None
        indexed = dataclasses.replace(latent, index_dim=2 * index.width)
        caches = [
            delta.cache if kind == LINEAR else indexed if index.has_own[i] else latent for i, kind in enumerate(kinds)
        ]
        return config.with_caches(caches).extended(
            Glm5NextConfig,
            delta=delta,
            lowest=lowest,
            index=index,
            num_streams=keys.size("hc_mult", 4, low=2),
            iterations=keys.size("hc_sinkhorn_iters", 20),
            stream_constant=keys.number("hc_eps", 1e-6),
        )

    def embedded(self, token_ids_T: Tensor, positions_T: Tensor) -> Tensor:
        return super().embedded(token_ids_T, positions_T).repeat(1, self.config.num_streams)

    def step(self, token_ids_T: Tensor, positions_T: Tensor, x_TD: Tensor, rows: PagedRows) -> StepAngles:
        none_T0 = torch.empty(len(positions_T), 0, dtype=torch.float32, device=positions_T.device)
        return StepAngles(((none_T0, none_T0),), choice=IndexerChoice())

    def merged(self, x_RX: Tensor) -> Tensor:
        return x_RX.view(len(x_RX), self.config.num_streams, self.config.hidden_size).float().mean(dim=1).to(x_RX.dtype)


def _clamped(keys: ConfigKeys, config: DeepseekConfig) -> DeepseekConfig:
    """With gates and ups that are limited."""
    limit = keys.number("swiglu_limit", 10.0)
    activation = CappedSwish(limit, limit / (1 + math.exp(-limit)))

    def clamped(i: int) -> MLPPart | ExpertsPart:
        part = config.layers[i].mlp
        if isinstance(part, MLPPart):
            return dataclasses.replace(part, activation=activation)
        return dataclasses.replace(part, moe=dataclasses.replace(part.moe, activation=activation))

    return config.with_mlps(clamped)


def _read_delta(keys: ConfigKeys) -> tuple[DeltaSizes, float]:
    """The sizes of the recurrent layers, and the bound of the exponents of their decays."""
    own = keys.child("linear_attn_config") or ConfigKeys({})
    heads = own.size("num_heads", keys.size("linear_num_heads", 64))
    width = own.size("head_dim", keys.size("linear_head_dim", 128))
    conv = own.size("short_conv_kernel_size", keys.size("linear_conv_kernel_dim", 4, low=2), low=2)
    default = None if keys.has("linear_lower_bound") else -5.0
    bound = own.get("gate_lower_bound", keys.get("linear_lower_bound", default))
    if bound is None and own.values and own.flag("safe_gate", True):
        bound = -5.0
    if bound is not None and (type(bound) not in (int, float) or not -1e3 < bound < 0):
        raise wrong("linear_lower_bound", bound, "a negative number")
    own.pass_over("safe_gate")
    own.finish()
    return DeltaSizes(heads, heads, width, width, conv), float(bound or 0)


def _read_index(keys: ConfigKeys, kinds: Sequence[str]) -> PooledIndex:
    block, budget = keys.size("index_kpool", 16), keys.size("index_topk", 2048)
    if budget < block:
        raise wrong("index_topk", budget, f"at least index_kpool, {block}")
    heads, width = keys.size("index_n_heads", 32), keys.size("index_head_dim", 128)
    owners = read_owners(keys, len(kinds))
    first = next((i for i, kind in enumerate(kinds) if kind != LINEAR), 0)
    if not owners[first]:
        raise wrong("indexer_types", keys.get("indexer_types"), f"full for layer {first}, before which none chooses")
    return PooledIndex(heads, width, block, budget // block, owners)
