"""The parts that decoders are put together from, as settings: a family is a configuration of these.

Shapes: N query heads, H head dim.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Self, TypeVar

from octavo.layers.mlp import PlainActivation
from octavo.layers.rotary import DefaultRope
from octavo.models.layer_cache import LayerCacheSpec
from octavo.models.model_config import ModelConfig
from octavo.models.moe_config import MoESettings
from octavo.models.rope_keys import RopeContext, read_rope
from octavo.ops.linear.linear import Activation
from octavo.ops.moe import CappedSwish, ClampedSwish, Routing


class Names(NamedTuple):
    """Names in a checkpoint: of the model's modules, then of those within a layer, whose norms may be absent."""

    embedding: str = "model.embed_tokens"
    layers: str = "model.layers"
    norm: str = "model.norm"
    head: str = "lm_head"
    queries: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    """Of the projections to queries, keys and values, or of the fused one."""
    output: str = "self_attn.o_proj"
    sinks: str = "self_attn.sinks"
    head_norms: tuple[str, str] = ("self_attn.q_norm", "self_attn.k_norm")
    before_attention: str | None = "input_layernorm"
    after_attention: str | None = None
    before_mlp: str | None = "post_attention_layernorm"
    after_mlp: str | None = None
    ups: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    """Of the gates and ups, the fused projection to both, or that to the ups of a feed-forward layer without gates."""
    down: str = "mlp.down_proj"


class NormPart(NamedTuple):
    """The norms of the residual stream."""

    is_layer_norm: bool = False
    """LayerNorm, not RMSNorm."""
    has_weight: bool = True
    has_bias: bool = True
    """For LayerNorm alone."""
    offset: float = 0.0
    """Added to the stored weights."""


LLAMA = Names()
RMS = NormPart()


class HeadNorm(NamedTuple):
    """The norms of queries and keys."""

    over: Literal["head", "each", "all"] = "head"
    """RMSNorm of a head with one weight [H] for all of them, LayerNorm of a head with a weight of its own [N, H], or
    RMSNorm over all heads of a token together."""
    has_weight: bool = True
    is_after_rope: bool = False
    offset: float = 0.0


class GatePart(NamedTuple):
    """What attention's outputs are multiplied by, before their projection: a function of a map of the layer's input."""

    name: str | None
    """Of the map, whose rows are before the queries; ``None``: the queries' own matrix has them."""
    function: Literal["sigmoid", "softplus"] = "sigmoid"
    is_of_head: bool = False
    """Whether a head has one gate, not one for each of its numbers."""


@dataclass(frozen=True, kw_only=True)
class AttentionPart:
    """The attention of a layer."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    value_dim: int = 0
    """Width of a value head, where it is narrower than a key head; 0: the same."""
    value_scale: float = 1.0
    window: int = 0
    """Sliding window, 0: full attention."""
    softcap: float = 0.0
    rope: int | None = 0
    """Which of the model's rotary embeddings, ``None``: no positions in this layer."""
    is_adjacent: bool = False
    """Whether rotated pairs are adjacent numbers, not half a width apart."""
    has_bias: bool = False
    """Whether queries, keys and values have biases."""
    has_output_bias: bool = False
    head_norm: HeadNorm | None = None
    has_sinks: bool = False
    slopes: tuple[float, ...] = ()
    """What each head's scores lose with each position of distance (ALiBi), if anything."""
    has_bias_of_distance: bool = False
    """Whether scores gain what maps of the row say for each distance."""
    clip: float = 0.0
    """Queries, keys and values are limited to this absolute value; 0: not limited."""
    gate: GatePart | None = None
    scales_queries: bool = False
    """Whether queries are multiplied by the model's factor of their position."""
    shared_with: int | None = None
    """The earlier layer whose keys and values this one reads."""

    @property
    def gate_rows(self) -> int:
        """Rows of the map to gates, 0 without any."""
        if self.gate is None:
            return 0
        return self.num_heads * (1 if self.gate.is_of_head else self.value_dim or self.head_dim)


@dataclass(frozen=True, kw_only=True)
class MLPPart:
    """A dense feed-forward layer."""

    size: int
    activation: Activation | CappedSwish | ClampedSwish | PlainActivation
    """Gated, if it is a name or has limits, or plain: of a layer without gates."""
    has_bias: bool = False


@dataclass(frozen=True, kw_only=True)
class ExpertsPart:
    """A mixture of experts; names are those in a checkpoint, within a layer."""

    moe: MoESettings
    routing: Routing
    router: str = "mlp.gate"
    correction: str | None = None
    """Of the tensor that is added to the scores for the selection."""
    experts: str = "mlp.experts"
    projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    stacked: tuple[str, ...] | None = None
    """Of the tensors [experts, outputs, inputs] with gates and ups, in one or in two, and with downs, if experts are
    stacked: always, if they are the weights of linear layers; else they may be [experts, inputs, outputs]."""
    shared: tuple[str, ...] = ("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj")
    shared_down: str = "mlp.shared_experts.down_proj"
    shared_gate: str | None = None
    """Of the map to how much the shared expert counts for a token."""
    shared_scale: float = 1.0
    shared_activation: Activation | CappedSwish | None = None
    """That of the shared expert, if it is not the others'."""
    shared_has_bias: bool = False


@dataclass(frozen=True, kw_only=True)
class LayerPart:
    """One layer."""

    attention: AttentionPart
    mlp: MLPPart | ExpertsPart
    cache: LayerCacheSpec | None = None
    """What it caches, if that is not the keys and values of ``attention``."""

    @property
    def is_recurrent(self) -> bool:
        """Whether it has a recurrence in place of attention."""
        return self.cache is not None and self.cache.kind == "state"


@dataclass(frozen=True)
class QueryScale:
    """Factors of queries by position: see ``query_scale``."""

    beta: float
    period: int
    offset: int = 0


C = TypeVar("C", bound="DecoderConfig")


@dataclass(frozen=True, kw_only=True)
class DecoderConfig(ModelConfig):
    """The parts of a decoder."""

    layers: tuple[LayerPart, ...]
    ropes: tuple[tuple[DefaultRope, int], ...]
    """The rotary embeddings that layers choose from, each with the width of its part of a head."""
    names: Names = LLAMA
    norm: NormPart = RMS
    is_parallel: bool = False
    """Whether attention and the feed-forward layer have the same input, and both are added to it."""
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    """Factor of what a layer's parts add to the residual stream."""
    logit_scale: float = 1.0
    final_softcap: float = 0.0
    """Soft cap of logits, 0 for none."""
    query_scale: QueryScale | None = None
    num_positions: int = 0
    """Learned positions, added to embeddings; 0: none."""
    first_position: int = 0
    """Index of the first token's learned position."""
    positions: str = ""
    """Name of the learned positions."""
    has_head_bias: bool = False
    has_embedding_norm: bool = False
    """Whether embeddings are normalised, by ``EMBEDDING_NORM`` beside them."""
    is_transposed: bool = False
    """Whether the matrices of layers are stored as [inputs, outputs]."""

    @property
    def cache(self) -> tuple[LayerCacheSpec, ...]:
        return tuple(
            part.cache
            or LayerCacheSpec(
                part.attention.num_kv_heads,
                part.attention.head_dim,
                part.attention.window,
                shared_with=part.attention.shared_with,
            )
            for part in self.layers
        )

    @property
    def query_rows(self) -> int:
        return self.layers[0].attention.num_heads * self.layers[0].attention.head_dim

    @property
    def has_stages(self) -> bool:
        return True

    @property
    def num_chosen_experts(self) -> int:
        return max((mixture.num_chosen for mixture in self.mixtures), default=0)

    @property
    def mixtures(self) -> tuple[MoESettings, ...]:
        """Of the layers with experts, those that differ."""
        return tuple(dict.fromkeys(part.mlp.moe for part in self.layers if isinstance(part.mlp, ExpertsPart)))

    @property
    def dense_sizes(self) -> set[int]:
        """Widths of feed-forward layers without experts."""
        return {part.mlp.size for part in self.layers if isinstance(part.mlp, MLPPart)}

    @property
    def rotary_embeddings(self) -> tuple[DefaultRope, ...]:
        return tuple(rope for rope, _ in self.ropes)

    def with_attention(self, **fields: Any) -> Self:
        """With other fields of the layers' attention; a list has one value for each layer."""
        layers = [
            dataclasses.replace(
                part,
                attention=dataclasses.replace(
                    part.attention,
                    **{name: value[i] if isinstance(value, list) else value for name, value in fields.items()},
                ),
            )
            for i, part in enumerate(self.layers)
        ]
        return dataclasses.replace(self, layers=tuple(layers))

    def without_rope(self) -> Self:
        """With no rotation of queries and keys in any layer."""
        return dataclasses.replace(self.with_attention(rope=None), ropes=())

    def with_mlps(self, make: Callable[[int], Any]) -> Self:
        """With other feed-forward layers: ``make(layer)``, or what was there where it gives ``None``."""
        layers = [dataclasses.replace(part, mlp=make(i) or part.mlp) for i, part in enumerate(self.layers)]
        widest = max(part.mlp.size if isinstance(part.mlp, MLPPart) else part.mlp.moe.widest for part in layers)
        return dataclasses.replace(self, layers=tuple(layers), ffn_size=widest)

    def with_experts(self, part: ExpertsPart) -> Self:
        """With this mixture in the layers that have experts."""
        return self.with_mlps(lambda i: part if part.moe.is_sparse[i] else None)

    def with_caches(self, caches: Sequence[LayerCacheSpec | None]) -> Self:
        """With what each layer caches, ``None``: its keys and values."""
        pairs = zip(self.layers, caches, strict=True)
        return dataclasses.replace(self, layers=tuple(dataclasses.replace(part, cache=cache) for part, cache in pairs))

    def extended(self, kind: type[C], **more: Any) -> C:
        """The same as a configuration of another kind, which has more fields."""
        return kind(**{field.name: getattr(self, field.name) for field in dataclasses.fields(self)} | more)

    def rope(self, given: Mapping[str, Any], max_len: int | None, width: int = 0) -> tuple[DefaultRope, int]:
        """A rotary embedding with these keys, of the first ``width`` numbers of a head, 0: of all; for ``ropes``."""
        width, most = width or self.head_dim, self.max_position_embeddings
        return read_rope(given, RopeContext(width, max_len or most, most)), width

    def with_mtp(self) -> Self:
        """With the layers of multi-token prediction behind its own: one, with full attention and, in a mixture, with
        experts."""
        last = next(part for part in reversed(self.layers) if not part.is_recurrent)
        experts = [part.mlp for part in self.layers if isinstance(part.mlp, ExpertsPart)]
        attention, mlp = dataclasses.replace(last.attention, window=0), experts[-1] if experts else last.mlp
        layers = (*self.layers, LayerPart(attention=attention, mlp=mlp, cache=last.cache))
        windows = (*self.windows, 0) if self.windows else ()
        return dataclasses.replace(self, num_layers=len(layers), layers=layers, windows=windows)

    @property
    def stream_eps(self) -> float:
        """The epsilon of norms of the residual stream.

        With a factor m of what is added to the stream, the model computes the stream divided by m: then nothing has to
        be multiplied, and a norm gives the same if its epsilon is divided by m squared.
        """
        return self.norm_eps / self.residual_scale**2
