"""Qwen4 (Qwen team, 2026), of which the text part is here: Qwen3.5 with experts, and more of three kinds.

The residual stream is several streams. Each part of a layer gets a mean of them, weighted by a map of the token, and
its result is added to each stream as much as another map says (as hyper-connections do, arXiv 2409.19606). Layers of
attention attend to blocks that an indexer chose (``ops.choose_blocks``). Some layers add embeddings of the last few
tokens together, found by their hashes, behind a convolution whose inputs lie a few tokens apart.

Shapes: T tokens of the step, R rows whose logits are needed, D model, I streams, P width of embeddings of hashes, N
heads of the indexer, H head dim, C blocks that a row attends to.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from octavo import ops
from octavo.layers.attention_inputs import StepAngles, gated
from octavo.layers.moe import MoE
from octavo.models.config_keys import ConfigKeys, wrong
from octavo.models.decoder import Decoder
from octavo.models.hybrid import LINEAR
from octavo.models.layer_cache import LayerCacheSpec, conv_state
from octavo.models.loader import WeightLoader
from octavo.models.model_config import FULL
from octavo.models.parts import DecoderConfig, Names
from octavo.models.qwen3_5 import Qwen3_5Layer
from octavo.models.qwen3_next import Qwen3NextConfig, read_qwen3_next
from octavo.models.qwen_moe import with_qwen_experts
from octavo.models.rope_keys import rope_values
from octavo.ops.attention.attention import LayerCache, PagedRows
from octavo.ops.attention.cached_rows import unpack_rows
from octavo.ops.attention.choose_blocks import RowPlaces, attend_to_blocks
from octavo.ops.attention.choose_keys import MOST_SCORES, sees_all
from octavo.ops.elementwise import sigmoid
from octavo.ops.hyper_connections import in_parts
from octavo.ops.recurrent.gated_norm import Gate

INDEXED = "indexed_attention"
NAMES = Names(before_attention=None, before_mlp=None)
QSA = ("indexer_n_heads", "indexer_kv_heads", "indexer_head_dim", "indexer_budget", "indexer_compress_ratio")
DIGITS = (0, 8, 16)
"""Places of the digits of a token, each of which a number of 16 bits holds exactly."""
SMALLEST_GATE = 1e-6


class IndexPart(NamedTuple):
    """The indexers of a model."""

    num_heads: int
    width: int
    block: int
    """Positions of a block."""
    most: int
    """Blocks that a row attends to, at most."""

    @property
    def dense_context(self) -> int:
        """Positions of the longest context of which all blocks are chosen."""
        return (self.most + 1) * self.block - 1


class HashPart(NamedTuple):
    """Embeddings of the hashes of the last tokens."""

    layers: tuple[int, ...]
    """Those that add them."""
    width: int
    """Of all embeddings of a token together."""
    most: int
    """Tokens that are hashed together, from 2 on to so many."""
    num_heads: int
    """Hashes of each number of tokens."""
    smallest: int
    """A bound below the sizes of their tables."""
    multiple: int
    """The rows of all tables together are filled up to a multiple of it."""
    seed: int
    end: int
    """The token that ends a text; tokens before it are as if they were it, too."""
    conv: int
    """Width of the convolution."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Qwen4Config(Qwen3NextConfig):
    num_streams: int
    rank: int
    """Of the map to the weights of streams."""
    index: IndexPart | None
    """Without it rows attend to all positions."""
    hashes: HashPart | None

    @property
    def has_stages(self) -> bool:
        return False  # between layers are all streams

    @property
    def dense_context(self) -> int:
        return 0 if self.index is None else self.index.dense_context

    def expanded_bytes(self, longest: int, num_tokens: int, itemsize: int, num_ranks: int) -> int:
        if self.index is None or longest <= self.dense_context:
            return 0
        return 8 * (max(MOST_SCORES, longest // self.index.block) + num_tokens * self.index.most)


class StreamNorm:
    """RMSNorm of each stream [T, I D], with a weight of its own."""

    def __init__(self, config: Qwen4Config, weights: WeightLoader, name: str) -> None:
        D, count = config.hidden_size, config.num_streams
        self.weight_X = weights.exact(f"{name}.weight", count * D) + config.norm.offset
        self.ones_D = torch.ones(D, dtype=torch.float32, device=weights.form.device)
        self.eps = config.norm_eps

    def __call__(self, x_TX: Tensor) -> Tensor:
        normed = ops.rms_norm(x_TX.float().view(-1, len(self.ones_D)), self.ones_D, self.eps)
        return (normed.view_as(x_TX) * self.weight_X).to(x_TX.dtype)


class Streams:
    """``mean over i of sigmoid(up(silu(down(h) / I)))[i] * h[i]`` with ``h = norm(x)``; and how much of what is made of
    it each stream gets, ``2 sigmoid(inject(h) / I)``, float32 [T, I]."""

    def __init__(self, config: Qwen4Config, weights: WeightLoader, name: str, has_parts: bool = True) -> None:
        D, self.count = config.hidden_size, config.num_streams
        self.norm = StreamNorm(config, weights, f"{name}.hc_norm")
        self.down = weights.replicated(f"{name}.input_mix_weight_down", config.rank, self.count * D)
        self.up = weights.replicated(f"{name}.input_mix_weight_up", self.count * D, config.rank)
        self.inject = None
        if has_parts:
            self.inject = weights.replicated(f"{name}.block_inject_weight", self.count, self.count * D)

    def __call__(self, x_TX: Tensor) -> Tensor:
        """The mean, [T, D]."""
        return self._mean(self.norm(x_TX))

    def mixed(self, x_TX: Tensor) -> tuple[Tensor, ...]:
        """The mean, and the streams' parts."""
        return in_parts(self._mixed_rows, x_TX)

    def _mixed_rows(self, x_TX: Tensor) -> tuple[Tensor, Tensor]:
        h_TX = self.norm(x_TX)
        assert self.inject is not None
        return self._mean(h_TX), 2 * sigmoid(self.inject(h_TX).float() / self.count)

    def _mean(self, h_TX: Tensor) -> Tensor:
        low = self.down(h_TX).float() / self.count
        weighted_TX = sigmoid(self.up((low * sigmoid(low)).to(h_TX.dtype)).float()) * h_TX
        return (functools.reduce(operator.add, weighted_TX.chunk(self.count, dim=1)) / self.count).to(h_TX.dtype)


def _added(x_TX: Tensor, y_TD: Tensor, parts_TI: Tensor) -> Tensor:
    """The streams with ``y`` times each one's part; a new tensor."""
    return in_parts(_added_rows, x_TX, y_TD, parts_TI)[0]


def _added_rows(x_TX: Tensor, y_TD: Tensor, parts_TI: Tensor) -> tuple[Tensor]:
    return ((x_TX + (y_TD.unsqueeze(1) * parts_TI.unsqueeze(2)).flatten(1)).to(x_TX.dtype),)


def _alone(y_TD: Tensor, x_TD: Tensor) -> Tensor:
    """What experts make, without the stream that it is usually added to."""
    return y_TD


def _as_is(x_TD: Tensor) -> Tensor:
    """The mean of the streams, which no norm is behind."""
    return x_TD


# ---- Embeddings of the last tokens together.


def _mixed_bits(value: int) -> int:
    """SplitMix64 (Steele, Lea and Flood, 2014): one number of 64 bits after another."""
    mask = (1 << 64) - 1
    value = (value + 0x9E3779B97F4A7C15) & mask
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & mask
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & mask
    return value ^ (value >> 31)


def hash_factors(part: HashPart, vocab_size: int, number: int) -> list[int]:
    """What tokens are multiplied by in the ``number``-th layer that adds embeddings: odd, and no product overflows."""
    bound = max(1, ((1 << 63) - 1) // vocab_size // 2)
    first = part.seed + 10_007 * number
    return [
        2 * (_mixed_bits(first + 0x9E3779B97F4A7C15 * (i + 1) & (1 << 64) - 1) % bound) + 1 for i in range(part.most)
    ]


def table_sizes(part: HashPart) -> list[list[int]]:
    """The sizes of the tables of each layer that adds embeddings: primes, one after the other."""
    each, candidate = (part.most - 1) * part.num_heads, part.smallest - 1
    found: list[int] = []
    while len(found) < each * len(part.layers):
        candidate += 1
        if candidate > 1 and all(candidate % divisor for divisor in range(2, math.isqrt(candidate) + 1)):
            found.append(candidate)
    return [found[i : i + each] for i in range(0, len(found), each)]


class TokenHashes:
    """Embeddings [T, P] of each token with the one before it, with the two before it, and so on."""

    def __init__(self, config: Qwen4Config, weights: WeightLoader, name: str, number: int) -> None:
        part = config.hashes
        assert part is not None
        self.part, device = part, weights.form.device
        sizes = table_sizes(part)[number]
        offsets = [sum(sizes[:i]) for i in range(len(sizes))]
        factors = hash_factors(part, config.vocab_size, number)
        numbers = {"layer_multipliers": factors, "ngram_heads_vocab_sizes": sizes, "ngram_heads_offsets": offsets}
        self.factors, self.sizes, self.offsets = (
            self._checked(weights, f"{name}.{kind}", expected).to(device) for kind, expected in numbers.items()
        )
        count = -(-sum(sizes) // part.multiple) * part.multiple
        self.embedding = weights.embedding(f"{name}.ngram_embedding", count, part.width // len(sizes))
        before = part.most - 1
        self.taps_WC = torch.zeros(part.most, before * len(DIGITS), dtype=weights.form.dtype, device=device)
        for i in range(before):
            self.taps_WC[before - 1 - i, i * len(DIGITS) : (i + 1) * len(DIGITS)] = 1
        self.places = torch.tensor(DIGITS, device=device)

    @staticmethod
    def _checked(weights: WeightLoader, name: str, expected: list[int]) -> Tensor:
        """The numbers, which the checkpoint may have, too; a trainer may send them rounded."""
        numbers, shape = torch.tensor(expected), (len(expected),)
        if weights.tensors.dtype(name) != torch.int64:
            weights.tensors.leave_out(name)
            return numbers
        stored = weights.tensors.typed(name, shape, torch.int64)
        differs = f"tensor {name} has other numbers than follow from the configuration"
        weights.tensors.check(stored.cpu() == numbers if not stored.is_meta else stored, differs)
        return numbers

    def __call__(self, token_ids_T: Tensor, state: Tensor, rows: PagedRows) -> Tensor:
        before, width = self.part.most - 1, len(DIGITS)
        digits_TW = (token_ids_T.unsqueeze(1) + 1 >> self.places) & 255
        inputs_TC = digits_TW.to(self.taps_WC.dtype).repeat(1, before)
        found_TC = ops.causal_conv(inputs_TC, self.taps_WC, None, state, rows.states)
        hashed_T, last_T = token_ids_T * self.factors[0], token_ids_T
        ids = []
        for i in range(before):
            earlier_T = (found_TC[:, i * width : (i + 1) * width].long() << self.places).sum(dim=1) - 1
            is_end_T = (earlier_T < 0) | (last_T == self.part.end) if i else earlier_T < 0
            last_T = earlier_T.masked_fill(is_end_T, self.part.end)
            hashed_T = hashed_T ^ (last_T * self.factors[i + 1])
            own = slice(i * self.part.num_heads, (i + 1) * self.part.num_heads)
            ids.append(hashed_T.unsqueeze(1) % self.sizes[own] + self.offsets[own])
        return self.embedding(torch.cat(ids, dim=1).flatten()).view(len(token_ids_T), -1)


class HashedLayer:
    """What is added to the streams before a layer: a value made of the embeddings, gated by how alike a stream and a
    key made of them are; and a convolution of that, whose inputs are so many tokens apart as are hashed together."""

    def __init__(self, config: Qwen4Config, weights: WeightLoader, name: str, number: int) -> None:
        part, D, self.count = config.hashes, config.hidden_size, config.num_streams
        assert part is not None
        self.hashes = TokenHashes(config, weights, f"{name}.ple_embedding", number)
        self.key = weights.replicated(f"{name}.key_proj", self.count * D, part.width)
        self.value = weights.replicated(f"{name}.value_proj", D, part.width)
        norms = (StreamNorm(config, weights, f"{name}.norm_{kind}") for kind in ("key", "query", "conv"))
        self.key_norm, self.query_norm, self.conv_norm = norms
        stored = weights.dense(f"{name}.conv1d.weight", self.count * D, 1, part.conv)
        self.taps_WC = stored.new_zeros((part.conv - 1) * part.most + 1, self.count * D)
        self.taps_WC[:: part.most] = stored.squeeze(1).t()

    def __call__(self, x_TX: Tensor, token_ids_T: Tensor, states: tuple[Tensor, ...], rows: PagedRows) -> Tensor:
        """The streams with it; a new tensor."""
        conv_state, token_state = states
        embedded_TP = self.hashes(token_ids_T, token_state, rows)
        values_TX, normed_TX = in_parts(self._values, embedded_TP, x_TX)
        moved_TX = ops.causal_conv(normed_TX, self.taps_WC, None, conv_state, rows.states, "silu")
        return (x_TX + values_TX).add_(moved_TX)

    def _values(self, embedded_TP: Tensor, x_TX: Tensor) -> tuple[Tensor, Tensor]:
        """The gated values of each stream, as they are and normed [T, X]."""
        products_TX = self.key_norm(self.key(embedded_TP)).float() * self.query_norm(x_TX).float()
        likeness_TI1 = products_TX.view(len(x_TX), self.count, -1).sum(dim=2, keepdim=True)
        likeness_TI1 = likeness_TI1 / (x_TX.shape[1] // self.count) ** 0.5
        gates_TI1 = sigmoid(likeness_TI1.abs().clamp(min=SMALLEST_GATE).sqrt() * likeness_TI1.sign())
        values_TX = (gates_TI1 * self.value(embedded_TP).unsqueeze(1)).flatten(1).to(x_TX.dtype)
        return values_TX, self.conv_norm(values_TX)


# ---- Layers.


class BlockIndexer:
    """Chooses the blocks that rows attend to; see ``ops.choose_blocks``."""

    def __init__(self, config: Qwen4Config, part: IndexPart, weights: WeightLoader, name: str) -> None:
        self.part, offset = part, config.norm.offset
        N, width = part.num_heads, part.width
        self.projections = weights.replicated(f"{name}.index_qk_proj", (N + 1) * width, config.hidden_size)
        norms = (weights.norm(f"{name}.{part}_layernorm", width, config.norm_eps, offset) for part in "qk")
        self.q_norm, self.k_norm = norms

    def __call__(self, h_TD: Tensor, step: StepAngles, cache: LayerCache, rows: PagedRows) -> Tensor | None:
        """Store the keys, and those of blocks that end; the blocks of each row [T, C], ``None``: all."""
        (N, width, block, most), T, index = self.part, len(h_TD), cache.index_keys
        assert index is not None
        qk_TNI = self.projections(h_TD).view(T, N + 1, width)
        key_T1I = qk_TNI[:, N:].contiguous()
        slots_T = rows.of(cache).slot_mapping_T
        ops.store_kv(key_T1I, key_T1I, index, index, slots_T)
        places = RowPlaces.of(cache, rows, T)
        is_last_T = (places.positions_T + 1) % block == 0
        back = torch.arange(1 - block, 1, device=h_TD.device)
        of_block_TB = places.slots((places.positions_T[:, None] + back).clamp_(min=0))
        means_TI = unpack_rows(index.flatten(0, 2)[of_block_TB], width).float().mean(dim=1).to(h_TD.dtype)
        q_TNI = self.q_norm(qk_TNI[:, :N].reshape(-1, width)).view(T, N, width)
        pooled_T1I = self.k_norm(means_TI).unsqueeze(1)
        own, of_starts = step.angles
        q_TNI, _ = ops.apply_rope(q_TNI, q_TNI[:, :1], *own)
        pooled_T1I, _ = ops.apply_rope(pooled_T1I, pooled_T1I, *of_starts)
        ops.store_kv(pooled_T1I, pooled_T1I, index, index, slots_T.where(is_last_T, -1))
        if sees_all(cache, rows, self.part.dense_context):
            return None
        return ops.choose_blocks(q_TNI, cache, rows, block, most)


class Qwen4Layer(Qwen3_5Layer):
    """The streams side by side, [T, I D]; before the first layer they are alike, and x is one of them."""

    def __init__(self, config: Qwen4Config, weights: WeightLoader, prefix: str, index: int) -> None:
        self.indexer: BlockIndexer | None = None
        super().__init__(config, weights, prefix, index)
        self.num_streams, self.is_first = config.num_streams, index == 0
        self.attention_streams = Streams(config, weights, f"{prefix}.attn_hyper_connection")
        self.mlp_streams = Streams(config, weights, f"{prefix}.mlp_hyper_connection")
        assert isinstance(self.mlp, MoE)
        self.mlp.after = _alone
        self.hashed: HashedLayer | None = None
        if config.hashes is not None and index in config.hashes.layers:
            self.hashed = HashedLayer(config, weights, f"{prefix}.ple", config.hashes.layers.index(index))

    def load_mixer(self, config: DecoderConfig, weights: WeightLoader, prefix: str, index: int) -> None:
        super().load_mixer(config, weights, prefix, index)
        assert isinstance(config, Qwen4Config)
        if self.recurrence is None and config.index is not None:
            self.indexer = BlockIndexer(config, config.index, weights, f"{prefix}.self_attn.indexer")

    def mix(self, x_TD: Tensor, step: StepAngles, cache: LayerCache, rows: PagedRows) -> Tensor:
        if self.indexer is None:
            return super().mix(x_TD, step, cache._replace(states=cache.states[:2]), rows)
        chosen_TC, qkv_TW = self.indexer(x_TD, step, cache, rows), self.qkv_proj(x_TD)
        if chosen_TC is None:
            return self.attend(qkv_TW, step, cache, rows)
        gates_TG, qkv_TW = qkv_TW.tensor_split([self.num_gates], dim=-1)
        size = self.indexer.part.block
        attended_TN = attend_to_blocks(ops.concat(qkv_TW), self.heads, step.angles[0], cache, rows, chosen_TC, size)
        return gated(gates_TG, attended_TN, "sigmoid")

    def __call__(self, x_TX: Tensor, step: StepAngles, cache: LayerCache, rows: PagedRows) -> Tensor:
        if self.is_first:
            x_TX = x_TX.repeat(1, self.num_streams)
        if self.hashed is not None:
            assert step.token_ids_T is not None
            x_TX = self.hashed(x_TX, step.token_ids_T, cache.states[2:], rows)
        h_TD, parts_TI = self.attention_streams.mixed(x_TX)
        mixed_TN, x_RX = rows.pick(self.mix(h_TD, step, cache, rows), x_TX)
        x_RX = _added(x_RX, self.o_proj(mixed_TN), rows.pick(parts_TI, parts_TI)[0])
        h_RD, parts_RI = self.mlp_streams.mixed(x_RX)
        return _added(x_RX, self.mlp(h_RD), parts_RI)


class Qwen4ExpForCausalLM(Decoder):
    layer_class: Any = Qwen4Layer
    config: Qwen4Config

    @classmethod
    def read_config(cls, keys: ConfigKeys, max_len: int | None) -> Qwen4Config:
        count = keys.size("num_hidden_layers", 40)
        kinds = keys.choices("layer_types", (LINEAR, INDEXED, FULL), count)
        every = keys.size("full_attention_interval", 4)
        kinds = kinds or tuple(INDEXED if (i + 1) % every == 0 else LINEAR for i in range(count))
        gates: dict[str, Gate] = {"silu": "silu", "swish": "silu", "sigmoid": "sigmoid"}
        gate = keys.choice("output_gate_type", gates, "silu")
        values = {
            **keys.values,
            "layer_types": [LINEAR if kind == LINEAR else FULL for kind in kinds],
            "output_gate_type": None,
            "rope_parameters": {"partial_rotary_factor": 1.0, **rope_values(keys)},
        }
        inner = keys.over(values)
        plain = read_qwen3_next(inner, max_len, ffn_size=keys.size("moe_intermediate_size", 512))
        plain = with_qwen_experts(inner, plain, 10, normalises=True, shared_size=512)
        keys.pass_over("number_of_conv_states", "split_ngram_parts", "rope_parameters", "rope_theta", "rope_scaling")
        delta = plain.delta._replace(gate=gate)
        config = dataclasses.replace(plain, names=NAMES, delta=delta).extended(
            Qwen4Config,
            num_streams=keys.size("hc_count", 4, low=2),
            rank=keys.size("hc_lowrank", 320),
            index=_read_index(keys, plain.ropes[0][1]),
            hashes=_read_hashes(keys, plain),
        )
        return config.with_caches([_cache(config, i, kind == LINEAR) for i, kind in enumerate(kinds)])

    def __init__(self, config: Qwen4Config, weights: WeightLoader) -> None:
        super().__init__(config, weights)
        self.streams = Streams(config, weights, "model.hyper_connection_mixer", has_parts=False)

    def last_norm(self, config: DecoderConfig, weights: WeightLoader) -> Any:
        return _as_is

    def merged(self, x_RX: Tensor) -> Tensor:
        return self.streams(x_RX)

    def step(self, token_ids_T: Tensor, positions_T: Tensor, x_TD: Tensor, rows: PagedRows) -> StepAngles:
        """Angles are those of positions, and those of the starts of blocks that would end there."""
        found = super().step(token_ids_T, positions_T, x_TD, rows)._replace(token_ids_T=token_ids_T)
        if self.config.index is None:
            return found
        starts_T = (positions_T + 1 - self.config.index.block).clamp(min=0)
        of_starts = self.rotaries[0](starts_T, rows.rope_shifts_AT)
        return found._replace(angles=(*found.angles, of_starts))


def _read_index(keys: ConfigKeys, rotated: int) -> IndexPart | None:
    if all(keys.get(key) is None for key in QSA):
        return None
    heads, kv_heads, width, budget, block = (keys.size(key) for key in QSA)
    if kv_heads != 1:
        raise wrong("indexer_kv_heads", kv_heads, "1")
    if budget % block:
        raise wrong("indexer_budget", budget, f"a multiple of indexer_compress_ratio, {block}")
    if width < rotated:
        raise wrong("indexer_head_dim", width, f"at least the {rotated} numbers of a head that are rotated")
    return IndexPart(heads, width, block, budget // block)


def _read_hashes(keys: ConfigKeys, config: DecoderConfig) -> HashPart | None:
    layers, count = keys.get("ple_layer_ids") or [], config.num_layers
    if not isinstance(layers, list | tuple) or not all(type(i) is int and 0 < i <= count for i in layers):
        raise wrong("ple_layer_ids", layers, f"a list of numbers of layers, from 1 to {count}")
    ends = keys.get("eos_token_id")
    end = ends[0] if isinstance(ends, list | tuple) and ends else ends
    part = HashPart(
        layers=tuple(sorted({i - 1 for i in layers})),
        width=keys.size("ple_embed_dim", config.hidden_size),
        most=keys.size("ngram_size", 3, low=2),
        num_heads=keys.size("heads_per_ngram", 8),
        smallest=keys.size("ngram_vocab_size_base", 20_000_000),
        multiple=keys.size("make_ngram_vocab_size_divisible_by", 128),
        seed=keys.size("seed", 1234, low=0),
        end=end if type(end) is int else -1,
        conv=keys.size("ple_conv_kernel_size", 4),
    )
    if not part.layers:
        return None
    if not 0 <= part.end < config.vocab_size:
        raise wrong("eos_token_id", ends, "a token, where layers add embeddings of several")
    if part.width % ((part.most - 1) * part.num_heads):
        raise wrong("ple_embed_dim", part.width, f"a multiple of {(part.most - 1) * part.num_heads} hashes")
    if any(not config.layers[i].is_recurrent for i in part.layers):
        raise wrong("ple_layer_ids", layers, f"layers of {LINEAR}")
    return part


def _cache(config: Qwen4Config, layer: int, is_recurrent: bool) -> LayerCacheSpec:
    """What a layer caches."""
    if not is_recurrent:
        width = config.index.width if config.index is not None else 0
        return LayerCacheSpec(config.num_kv_heads, config.head_dim, index_dim=width)
    part, found = config.hashes, config.delta.cache
    if part is None or layer not in part.layers:
        return found
    inputs = conv_state((part.conv - 1) * part.most + 1, config.num_streams * config.hidden_size, 0)
    tokens = conv_state(part.most, (part.most - 1) * len(DIGITS), 0)
    return dataclasses.replace(found, state=(*found.state, inputs, tokens))
