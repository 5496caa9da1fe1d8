"""Llama (arXiv 2302.13971 and 2407.21783), and models of the same architecture.

Shapes: T tokens of the step, R rows whose logits are needed, D model, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from octavo.layers.attention import attention
from octavo.layers.linear import Linear
from octavo.layers.mlp import GatedMLP
from octavo.layers.output_mlp import output_mlp
from octavo.layers.rotary import DefaultRope, Rotary
from octavo.models.config import ACTIVATIONS, FULL, ModelConfig, layer_windows, read_common, read_layer_types
from octavo.models.config_keys import ConfigKeys
from octavo.models.loader import WeightLoader
from octavo.models.moe import MoESettings
from octavo.models.rope import RopeContext, longest_context, read_rope, rope_values, rotary_width
from octavo.ops.attention import HeadLayout, LayerCache, PagedRows
from octavo.ops.linear import Activation


@dataclass(frozen=True, kw_only=True)
class LlamaConfig(ModelConfig):
    """The configuration of Llama and of its variants."""

    rope: DefaultRope
    rotary_width: int
    """Leading numbers of each head that are rotated."""
    attention_bias: bool
    """Whether queries, keys and values have biases."""
    output_bias: bool
    """Whether the attention's output projection has a bias."""
    mlp_bias: bool
    activation: Activation
    norm_offset: float = 0.0
    """Offset added to the stored norm weights."""
    moe: MoESettings | None = None
    """Settings of a mixture of experts, ``None`` for dense models."""

    @property
    def rotary_embeddings(self) -> tuple[DefaultRope, ...]:
        return (self.rope,)

    @property
    def dense_size(self) -> int:
        """Width of a feed-forward layer without experts."""
        return self.ffn_size if self.moe is None else self.moe.dense_size

    def with_mtp(self) -> LlamaConfig:
        """The configuration with the layers of multi-token prediction behind its own: one, with full attention and, in
        a mixture, with experts."""
        moe = self.moe
        if moe is not None:
            moe = dataclasses.replace(moe, is_sparse=(*moe.is_sparse, True))
        windows = (*self.windows, 0) if self.windows else ()
        return dataclasses.replace(self, num_layers=self.num_layers + 1, windows=windows, moe=moe)


def read_llama(
    keys: ConfigKeys,
    max_len: int | None,
    *,
    tied: bool = False,
    eps: float = 1e-6,
    head_dim: int | None = None,
    activation_key: str = "hidden_act",
    activation: str = "silu",
    rotary: float = 1.0,
    windows: tuple[Sequence[str], int | None] | None = None,
    rope: dict[str, Any] | None = None,
    ffn_size: int | None = None,
    num_layers: int | None = None,
) -> LlamaConfig:
    """Read Llama's configuration, with a family's own defaults; biases follow ``attention_bias`` and ``mlp_bias``.

    ``windows`` holds the type of each layer and the sliding window; without it all layers have full attention.
    ``rope`` holds the rotary keys if they are not in the usual place, ``ffn_size`` is the default of
    ``intermediate_size``, ``num_layers`` that of ``num_hidden_layers``.
    """
    common = read_common(keys, tied=tied, head_dim=head_dim, eps=eps, ffn_size=ffn_size, num_layers=num_layers)
    given, most = rope or rope_values(keys), common["max_position_embeddings"]
    common["max_position_embeddings"] = longest_context(given, most)
    longest = max_len or common["max_position_embeddings"]
    width = rotary_width(given, common["head_dim"], rotary)
    types, window = windows or (read_layer_types(keys, (FULL,) * common["num_layers"]), None)
    has_bias = keys.flag("attention_bias")
    return LlamaConfig(
        **common,
        rope=read_rope(given, RopeContext(width, longest, most)),
        rotary_width=width,
        windows=layer_windows(types, window, longest),
        attention_bias=has_bias,
        output_bias=has_bias,
        mlp_bias=keys.flag("mlp_bias"),
        activation=keys.choice(activation_key, ACTIVATIONS, activation),
    )


FeedForward = Callable[[Tensor], Tensor]
"""Maps the residual stream [T, D], which it may overwrite, to the next one."""


class LlamaLayer:
    """Attention, then the feed-forward layer; each normalises its input and adds to the residual stream."""

    def __init__(self, config: LlamaConfig, weights: WeightLoader, prefix: str, index: int) -> None:
        D = config.hidden_size
        self.input_norm = weights.norm(f"{prefix}.input_layernorm", D, config.norm_eps, config.norm_offset)
        self.heads = self.head_layout(config, weights, f"{prefix}.self_attn", index)
        self.qkv_proj = self.qkv(config, weights, f"{prefix}.self_attn")
        self.o_proj = weights.row(f"{prefix}.self_attn.o_proj", D, self.heads.sizes[0], config.output_bias)
        self.mlp = self.feed_forward(config, weights, prefix, index)
        self.heads = weights.own_heads(self.heads)

    def head_layout(self, config: LlamaConfig, weights: WeightLoader, prefix: str, index: int) -> HeadLayout:
        """The attention settings of layer ``index``; ``prefix`` is that of the attention's weights."""
        scale, window = config.head_dim**-0.5, config.windows[index]
        return HeadLayout(config.num_heads, config.num_kv_heads, config.head_dim, scale, window=window)

    def qkv(self, config: LlamaConfig, weights: WeightLoader, prefix: str) -> Linear:
        """Queries, keys and values side by side."""
        names = [f"{prefix}.{part}_proj" for part in "qkv"]
        return weights.qkv(names, self.heads, config.hidden_size, config.attention_bias)

    def feed_forward(self, config: LlamaConfig, weights: WeightLoader, prefix: str, index: int) -> FeedForward:
        """The feed-forward part of layer ``index`` with its norm; ``prefix`` is that of the layer."""
        if config.moe is not None and config.moe.is_sparse[index]:
            return self.mixture(config, config.moe, weights, prefix)
        D, F = config.hidden_size, config.dense_size
        return GatedMLP(
            weights.norm(f"{prefix}.post_attention_layernorm", D, config.norm_eps, config.norm_offset),
            self.gate_up(config, weights, f"{prefix}.mlp"),
            weights.row(f"{prefix}.mlp.down_proj", D, F, config.mlp_bias),
            config.activation,
        )

    def mixture(self, config: LlamaConfig, moe: MoESettings, weights: WeightLoader, prefix: str) -> FeedForward:
        """The feed-forward part of a layer with experts; overridden by families with experts."""
        raise NotImplementedError

    def gate_up(self, config: LlamaConfig, weights: WeightLoader, prefix: str) -> Linear:
        """The gate and up projections, concatenated."""
        names = [f"{prefix}.gate_proj", f"{prefix}.up_proj"]
        return weights.gate_up(names, config.dense_size, config.hidden_size, config.mlp_bias)

    def __call__(self, x_TD: Tensor, angles: tuple[Tensor, Tensor], cache: LayerCache, rows: PagedRows) -> Tensor:
        """The next residual stream, [T, D], or [R, D] with logits indices; ``x`` may be overwritten."""
        qkv_TW = self.qkv_proj(x_TD, norm=self.input_norm)
        attended_TN, x_TD = rows.pick(attention(qkv_TW, self.heads, *angles, cache, rows), x_TD)
        return output_mlp(self.o_proj, self.mlp, attended_TN, x_TD)


class LlamaForCausalLM:
    """The complete model: embedding, layers, final norm and head."""

    layer_class: type[LlamaLayer] = LlamaLayer

    @classmethod
    def read_config(cls, keys: ConfigKeys, max_len: int | None) -> LlamaConfig:
        """Read the family's configuration; ``max_len`` is the longest context that will be used, if known.

        Raises ``CheckpointError`` naming a key that is missing, wrong or not supported.
        """
        return read_llama(keys, max_len)

    def __init__(self, config: LlamaConfig, weights: WeightLoader) -> None:
        self.config = config
        shape = config.vocab_size, config.hidden_size
        self.embedding = weights.embedding("model.embed_tokens", *shape, config.tie_word_embeddings)
        self.rotary = Rotary(config.rope, config.rotary_width, weights.form.device)
        self.layers = [self.layer_class(config, weights, f"model.layers.{i}", i) for i in range(config.num_layers)]
        self.norm = weights.norm("model.norm", config.hidden_size, config.norm_eps, config.norm_offset)
        self.head = weights.head("lm_head", self.embedding, shape, config.tie_word_embeddings)

    def forward(
        self, token_ids_T: Tensor, positions_T: Tensor, caches: Sequence[LayerCache], rows: PagedRows
    ) -> Tensor:
        """Compute these tokens and extend the caches; token ids and positions are int64. Returns the last layer's
        output, [T, D], or [R, D] with logits indices."""
        x_TD = self.embed(token_ids_T, rows)
        angles = self.rotary(positions_T, rows.rope_shifts_AT)
        by_layer = rows.of_layers(len(self.layers))
        for index, (layer, cache, own_rows) in enumerate(zip(self.layers, caches, by_layer, strict=True)):
            x_TD = layer(x_TD, angles, cache, own_rows)
            if rows.images is not None:
                x_TD = rows.images.deepen(index, x_TD, own_rows.logits_indices_R)
        return x_TD

    def embed(self, token_ids_T: Tensor, rows: PagedRows) -> Tensor:
        """Embeddings of tokens and, where a row is one, of images: [T, D]."""
        x_TD = self.embedding(token_ids_T)
        return x_TD if rows.images is None else rows.images.put(x_TD)

    def logits(self, x_RD: Tensor) -> Tensor:
        """Logits of the next token [R, V], for rows returned by ``forward``."""
        return self.head(x_RD, norm=self.norm)
