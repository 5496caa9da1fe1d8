"""An encoder that is put together from parts (``parts.py``): most families are a configuration of it and nothing more.

Every token attends to all tokens of its text, or to those within a window on both sides. A layer normalises the input
of its two parts, as decoders do, or the sum of each part and its input, as BERT does.

Shapes: T tokens of several texts, S texts, L labels, R rows, N heads, H head dim, W = (N + 2 K) H, D model, M the
largest distance that is told apart from longer ones.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from octavo import ops
from octavo.errors import CheckpointError
from octavo.layers.attention_inputs import StepAngles
from octavo.layers.linear import Linear
from octavo.layers.mlp import MLP, PlainActivation
from octavo.layers.norm import Norm
from octavo.layers.rotary import DefaultRope, Rotary
from octavo.models.config_keys import ConfigKeys, wrong
from octavo.models.decoder import PLAIN_ACTIVATIONS
from octavo.models.decoder_layer import DecoderLayer
from octavo.models.labels import LabelHead, LabelPart
from octavo.models.loader import WeightLoader
from octavo.models.model_config import read_common
from octavo.models.parts import AttentionPart, DecoderConfig, LayerPart, MLPPart, Names, NormPart
from octavo.ops.linear.linear import Activation

LAYER_NORM = NormPart(is_layer_norm=True)
TRAINING = (
    *("attention_probs_dropout_prob", "classifier_dropout", "gradient_checkpointing", "hidden_dropout_prob"),
    *("initializer_factor", "mask_token_id", "cls_token_id", "eos_token_id"),  # the tokenizer adds the tokens
)
"""Keys that change no answer."""


class PackedTexts(NamedTuple):
    """Complete texts, packed one after the other."""

    token_ids_T: Tensor
    """int64."""
    positions_T: Tensor
    """int64, from 0 in each text."""
    types_T: Tensor
    """int64 token types: 0, and 1 in the second text of a pair."""
    ends: list[int]
    """End of each text's rows: the running sum of the lengths."""


class DistancePart(NamedTuple):
    """Biases of attention scores by the distance between two tokens (arXiv 1910.10683, section 2.1)."""

    name: str
    num_buckets: int
    max_distance: int


@dataclass(frozen=True, kw_only=True)
class EncoderConfig(DecoderConfig):
    """The parts of an encoder. All names are those without ``root``; an empty name says that there is none."""

    root: str = ""
    """What precedes the names in a checkpoint with a head, and in some without."""
    is_post_norm: bool = False
    embedding_norm: str = ""
    types: str = ""
    """Name of the token types' embeddings."""
    num_types: int = 0
    embedding_size: int = 0
    """Width of the embeddings, 0: that of the model."""
    projection: str = ""
    """Of the map from embeddings of another width to the model's."""
    is_projected_first: bool = False
    """Whether embeddings are projected before their norm, not after it."""
    vocabulary: LabelPart | None = None
    """The head of a masked language model, for vectors that have a number for each token of the vocabulary."""
    uses_vocabulary: bool = False
    """Whether that head is loaded; a checkpoint may lack it."""
    distances: DistancePart | None = None
    left_out: tuple[str, ...] = ()
    """Beginnings of the names of tensors that belong to other heads."""

    @property
    def embedding_width(self) -> int:
        return self.embedding_size or self.hidden_size


def read_encoder(
    keys: ConfigKeys,
    *,
    names: Names,
    norm: NormPart = LAYER_NORM,
    eps_key: str = "layer_norm_eps",
    eps: float = 1e-12,
    activation_key: str = "hidden_act",
    activations: Mapping[str, Activation | PlainActivation] = PLAIN_ACTIVATIONS,
    activation: str = "gelu",
    has_bias: bool = True,
    mlp_bias: bool = True,
    positions: int = 512,
    windows: Sequence[int] = (),
    rope_of: Sequence[int] | None = None,
    ropes: tuple[tuple[DefaultRope, int], ...] = (),
) -> EncoderConfig:
    """Read the keys that most families have, with a family's own defaults: equal layers, with LayerNorms.

    ``windows`` has how far each layer's tokens see on either side, 0 for all of a text; ``rope_of`` which rotary
    embedding each layer uses, ``None`` for none. Raises ``CheckpointError`` naming a key.
    """
    if keys.flag("is_decoder"):
        raise wrong("is_decoder", True, "false: encoder attention is bidirectional")
    keys.pass_over(*TRAINING)
    own = keys.over({**keys.values, "eos_token_id": None})
    common = read_common(own, tied=True, eps=eps, eps_key=eps_key, positions=positions)
    attention = AttentionPart(
        **{name: common[name] for name in ("num_heads", "num_kv_heads", "head_dim")},
        scale=common["head_dim"] ** -0.5,
        rope=None,
        has_bias=has_bias,
        has_output_bias=has_bias,
    )
    choice = keys.choice(activation_key, activations, activation)
    mlp = MLPPart(size=common["ffn_size"], activation=choice, has_bias=mlp_bias)
    spans = tuple(windows) or (0,) * common["num_layers"]
    config = EncoderConfig(
        **common,
        layers=(LayerPart(attention=attention, mlp=mlp),) * common["num_layers"],
        ropes=ropes,
        names=names,
        norm=norm,
        is_post_norm=names.before_attention is None,
    )
    return config.with_attention(window=list(spans), rope=None if rope_of is None else list(rope_of))


def under_names(keys: ConfigKeys, older: Mapping[str, str]) -> ConfigKeys:
    """The keys, some of them also under the names that other families have for them."""
    found = {name: keys.get(old) for name, old in older.items()}
    return keys.over({**keys.values, **{name: value for name, value in found.items() if value is not None}})


class EncoderLayer(DecoderLayer):
    """A layer whose tokens attend in both directions."""

    def __init__(self, config: EncoderConfig, weights: WeightLoader, prefix: str, index: int) -> None:
        super().__init__(config, weights, prefix, index)
        self.is_post_norm = config.is_post_norm

    def encode(self, x_TD: Tensor, step: StepAngles, ends: Sequence[int], bias_NM: Tensor | None) -> Tensor:
        """The next residual stream [T, D]; ``x`` may be overwritten. ``bias``: see ``ops.encoder_attention``."""
        qkv_TW = self.qkv_proj.of_normed(x_TD, self.before_attention)
        attended_TN = self.attend_to_all(qkv_TW, step, ends, bias_NM)
        if self.is_post_norm:
            assert self.after_attention is not None
            assert isinstance(self.mlp, MLP)
            return self.mlp.normed_sum(self.after_attention(self.o_proj(attended_TN, residual=x_TD)))
        if self.after_attention is None:
            return self.mlp(self.o_proj(attended_TN, residual=x_TD))
        return self.mlp(self.after_attention(self.o_proj(attended_TN), x_TD))

    def attend_to_all(self, qkv_TW: Tensor, step: StepAngles, ends: Sequence[int], bias_NM: Tensor | None) -> Tensor:
        """Attention of projected queries, keys and values within each text, [T, N H]."""
        heads, T = self.heads, len(qkv_TW)
        parts = qkv_TW.split_with_sizes(heads.sizes, dim=-1)
        q_TNH, k_TKH, v_TKH = (part.view(T, -1, heads.head_dim) for part in parts)
        if heads.q_norm_H is not None and heads.k_norm_H is not None:
            normed = ((q_TNH, heads.q_norm_H), (k_TKH, heads.k_norm_H))
            q_TNH, k_TKH = (
                ops.rms_norm(x.reshape(-1, heads.head_dim), weight_H, heads.norm_eps).view(x.shape)
                for x, weight_H in normed
            )
        cos_TR, sin_TR = step.of(self.part.rope)
        if cos_TR is not None and sin_TR is not None:
            q_TNH, k_TKH = ops.apply_rope(q_TNH, k_TKH, cos_TR, sin_TR)
        attended_TNH = ops.encoder_attention(q_TNH, k_TKH, v_TKH, ends, heads.scale, heads.window, bias_NM)
        return attended_TNH.view(T, -1)


class Encoder:
    """Computes the vectors of all tokens of texts, and a text's or a token's labels."""

    layer_class: type[EncoderLayer] = EncoderLayer

    @classmethod
    def read_config(cls, keys: ConfigKeys, max_len: int | None) -> EncoderConfig:
        """Read the family's configuration; ``max_len`` is the length of the longest text, if known.

        Raises ``CheckpointError`` naming a key that is missing, wrong or not supported.
        """
        raise NotImplementedError

    def __init__(self, config: EncoderConfig, weights: WeightLoader) -> None:
        plain = f"{config.names.embedding}.weight"
        root = config.root if weights.tensors.has(config.root + plain) or not weights.tensors.has(plain) else ""
        self.config = config = with_root(config, root)
        names, D, eps = config.names, config.hidden_size, config.norm_eps
        E = config.embedding_width
        self.embedding = weights.embedding(names.embedding, config.vocab_size, E)
        self.embedding_scale = weights.rounded(config.embedding_scale)
        self.positions, self.types = None, None
        if config.num_positions:
            self.positions = weights.small_embedding(config.positions, config.num_positions, E)
        if config.num_types:
            self.types = weights.small_embedding(config.types, config.num_types, E)
        self.embedding_norm: Norm | None = None
        if config.embedding_norm:
            width = D if config.is_projected_first else E
            self.embedding_norm = weights.stream_norm(config.embedding_norm, width, eps, config.norm)
        self.projection: Linear | None = None
        if E != D:
            self.projection = weights.replicated(config.projection, D, E, not config.is_projected_first)
        device = weights.form.device
        if any(rope.sets is not None for rope, _ in config.ropes):
            message = "config: an encoder's 'rope_scaling' has the same frequencies for all texts here"
            raise CheckpointError(f"{message}; set max_model_len to the original length")
        self.rotaries = [Rotary(rope, width, device) for rope, width in config.ropes]
        self.bias_NM = None if config.distances is None else distance_bias(config, config.distances, weights)
        self.layers = [self.layer_class(config, weights, f"{names.layers}.{i}", i) for i in range(config.num_layers)]
        self.norm = weights.stream_norm(names.norm, D, eps, config.norm) if names.norm else None
        self.labels = None if config.labels is None else weights.labels(config.labels, D, eps, config.norm)
        self.vocabulary: LabelHead | None = None
        if config.uses_vocabulary and config.vocabulary is not None:
            self.vocabulary = self._vocabulary_head(config.vocabulary, weights)
        for prefix in ("embeddings.position_ids", *config.left_out):
            weights.tensors.leave_out(prefix)
            weights.tensors.leave_out(config.root + prefix)

    def _vocabulary_head(self, part: LabelPart, weights: WeightLoader) -> LabelHead:
        """The map to logits of tokens, whose matrix may be that of the embedding."""
        config, D = self.config, self.config.hidden_size
        dense = weights.replicated(part.dense, D, D, True)
        norm = weights.stream_norm(part.norm, D, config.norm_eps, config.norm)
        shape = config.vocab_size, D
        tied = (config.names.embedding, self.embedding) if config.tie_word_embeddings else None
        out = weights.head(part.out, shape, tied, has_bias=True)
        return LabelHead(part, dense, norm, out)

    def forward(self, texts: PackedTexts) -> Tensor:
        """The vectors of all tokens [T, D]."""
        x_TD = self.embedded(texts)
        step = StepAngles(tuple(rotary(texts.positions_T) for rotary in self.rotaries))
        for layer in self.layers:
            x_TD = layer.encode(x_TD, step, texts.ends, self.bias_NM)
        return x_TD if self.norm is None else self.norm(x_TD)

    def embedded(self, texts: PackedTexts) -> Tensor:
        """The residual stream before the first layer, [T, D]."""
        config = self.config
        x_TE = self.embedding(texts.token_ids_T)
        if self.embedding_scale != 1.0:
            x_TE = x_TE * self.embedding_scale
        if self.types is not None:
            x_TE = x_TE + self.types(texts.types_T.clamp(max=config.num_types - 1))
        if self.positions is not None:
            x_TE = x_TE + self.positions(texts.positions_T + config.first_position)
        if self.projection is not None and config.is_projected_first:
            x_TE = self.projection(x_TE)
        if self.embedding_norm is not None:
            x_TE = self.embedding_norm(x_TE)
        if self.projection is not None and not config.is_projected_first:
            x_TE = self.projection(x_TE)
        return x_TE


def with_root(config: EncoderConfig, root: str) -> EncoderConfig:
    """The configuration with ``root`` before all names but those of other heads."""
    names, distances = config.names, config.distances
    return dataclasses.replace(
        config,
        names=names._replace(
            embedding=root + names.embedding, layers=root + names.layers, norm=root + names.norm if names.norm else ""
        ),
        positions=root + config.positions,
        types=root + config.types,
        embedding_norm=root + config.embedding_norm if config.embedding_norm else "",
        projection=root + config.projection,
        distances=None if distances is None else distances._replace(name=root + distances.name),
    )


def distance_bias(config: EncoderConfig, part: DistancePart, weights: WeightLoader) -> Tensor:
    """The bias of each head [N, 2 M + 1] in float32, for keys from M tokens before the query to M behind it.

    Half of the buckets are for keys behind the query; of each half, a half is for one distance each, the others are
    logarithmic up to the largest distance, which all longer ones share.
    """
    table_BN = weights.exact(f"{part.name}.weight", part.num_buckets, config.num_heads)
    each, exact = part.num_buckets // 2, part.num_buckets // 4
    distance_M = torch.arange(-part.max_distance, part.max_distance + 1, device=table_BN.device)
    far_M = (
        exact
        + ((distance_M.abs().float() / exact).log() / math.log(part.max_distance / exact) * (each - exact))
        .clamp(min=0)
        .long()
    )
    bucket_M = torch.where(distance_M.abs() < exact, distance_M.abs(), far_M.clamp(max=each - 1))
    return table_BN[bucket_M + each * (distance_M > 0)].T.contiguous()
