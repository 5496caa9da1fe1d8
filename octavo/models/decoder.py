"""A decoder that is put together from parts (``parts.py``): most families are a configuration of it and nothing more.

Shapes: T tokens of the step, R rows whose logits are needed, D model, N heads, H head dim, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from octavo import ops
from octavo.layers.attention import RankRows
from octavo.layers.attention_inputs import StepAngles, query_scale
from octavo.layers.mlp import PlainActivation, gelu, gelu_tanh, relu, silu, squared_relu
from octavo.layers.norm import Norm
from octavo.layers.rotary import Rotary
from octavo.models.config_keys import ConfigKeys
from octavo.models.decoder_layer import DecoderLayer
from octavo.models.loader import WeightLoader
from octavo.models.model_config import ACTIVATIONS, FULL, layer_windows, read_common, read_layer_types
from octavo.models.parts import LLAMA, RMS, AttentionPart, DecoderConfig, LayerPart, MLPPart, Names, NormPart
from octavo.models.rope_keys import RopeContext, longest_context, read_rope, rope_values, rotary_width
from octavo.ops.attention.attention import LayerCache, PagedRows
from octavo.ops.linear.linear import Activation

PLAIN_ACTIVATIONS: dict[str, Activation | PlainActivation] = {
    "gelu": gelu,
    "gelu_fast": gelu_tanh,
    "gelu_new": gelu_tanh,
    "gelu_pytorch_tanh": gelu_tanh,
    "relu": relu,
    "relu2": squared_relu,
    "silu": silu,
    "swish": silu,
}
"""Activations of feed-forward layers without gates."""


NO_WINDOWS: tuple[Sequence[str], None] = (), None
"""For ``read_decoder``: no layer has any, and ``layer_types`` means something else."""


def read_decoder(
    keys: ConfigKeys,
    max_len: int | None,
    *,
    tied: bool = False,
    eps: float = 1e-6,
    eps_key: str = "rms_norm_eps",
    head_dim: int | None = None,
    ffn_size: int | None = None,
    num_layers: int | None = None,
    activation_key: str = "hidden_act",
    activation: str = "silu",
    activations: Mapping[str, Activation | PlainActivation] = ACTIVATIONS,
    rotary: float | None = None,
    theta: float = 10_000.0,
    rope: Mapping[str, Any] | None = None,
    windows: tuple[Sequence[str], int | None] | None = None,
    has_bias: bool | None = None,
    mlp_bias: bool | None = None,
    names: Names | None = None,
    norm: NormPart | None = None,
) -> DecoderConfig:
    """Read the keys that most families have, with a family's own defaults: equal layers with Llama's parts.

    ``rope`` holds the rotary keys if they are not in the usual place, ``windows`` the type of each layer and the
    sliding window; without it all layers have full attention. Biases follow ``attention_bias`` and ``mlp_bias`` unless
    given. ``rotary``: see ``rotary_width``.
    """
    sizes = {"head_dim": head_dim, "ffn_size": ffn_size, "num_layers": num_layers}
    common = read_common(keys, tied=tied, eps=eps, eps_key=eps_key, **sizes)
    given = {"rope_theta": theta, **(rope_values(keys) if rope is None else rope)}
    most, H = common["max_position_embeddings"], common["head_dim"]
    common["max_position_embeddings"] = longest_context(given, most)
    longest = max_len or common["max_position_embeddings"]
    width = rotary_width(given, H, rotary)
    types, window = windows or (read_layer_types(keys), None)
    has_bias = keys.flag("attention_bias") if has_bias is None else has_bias
    attention = AttentionPart(
        num_heads=common["num_heads"],
        num_kv_heads=common["num_kv_heads"],
        head_dim=H,
        scale=H**-0.5,
        has_bias=has_bias,
        has_output_bias=has_bias,
    )
    mlp = MLPPart(
        size=common["ffn_size"],
        activation=keys.choice(activation_key, activations, activation),
        has_bias=keys.flag("mlp_bias") if mlp_bias is None else mlp_bias,
    )
    spans = layer_windows(types or (FULL,) * common["num_layers"], window, longest)
    layers = [LayerPart(attention=dataclasses.replace(attention, window=span), mlp=mlp) for span in spans]
    return DecoderConfig(
        **common,
        windows=spans,
        layers=tuple(layers),
        ropes=((read_rope(given, RopeContext(width, longest, most)), width),),
        names=names or LLAMA,
        norm=norm or RMS,
    )


EMBEDDING_NORM = "word_embeddings_layernorm"


class Decoder:
    """The complete model: embedding, layers, final norm and head."""

    layer_class: type[DecoderLayer] = DecoderLayer

    @classmethod
    def read_config(cls, keys: ConfigKeys, max_len: int | None) -> DecoderConfig:
        """Read the family's configuration; ``max_len`` is the longest context that will be used, if known.

        Raises ``CheckpointError`` naming a key that is missing, wrong or not supported.
        """
        return read_decoder(keys, max_len)

    def __init__(self, config: DecoderConfig, weights: WeightLoader) -> None:
        self.config, names, D = config, config.names, config.hidden_size
        shape, device = (config.vocab_size, D), weights.form.device
        if config.stage.is_first or config.tie_word_embeddings:
            self.embedding = weights.embedding(names.embedding, *shape, config.tie_word_embeddings)
        else:
            weights.tensors.leave_out(f"{names.embedding}.")
        self.embedding_scale = config.embedding_scale / config.residual_scale
        self.positions = None
        if config.num_positions:
            self.positions = weights.small_embedding(config.positions, config.num_positions, D)
        self.embedding_norm: Norm | None = None
        if config.has_embedding_norm:
            name = f"{names.embedding.rpartition('.')[0]}.{EMBEDDING_NORM}"
            self.embedding_norm = weights.stream_norm(name, D, config.norm_eps, config.norm)
        rotates = any(part.attention.rope is not None for part in config.layers)
        self.rotaries = [Rotary(rope, width, device) for rope, width in config.ropes] if rotates else []
        self.own = config.stage.layers(config.num_layers)
        for i in set(range(config.num_layers)).difference(self.own):
            weights.tensors.leave_out(f"{names.layers}.{i}.")
        self.layers = [self.layer_class(config, weights, f"{names.layers}.{i}", i) for i in self.own]
        self.norm = self.last_norm(config, weights)
        if config.logit_scale != 1.0:
            self.norm.weight_D = (self.norm.weight_D.float() * config.logit_scale).to(weights.form.dtype)
        tied = (names.embedding, self.embedding) if config.tie_word_embeddings else None
        self.head = weights.head(names.head, shape, tied, config.has_head_bias)

    def last_norm(self, config: DecoderConfig, weights: WeightLoader) -> Norm:
        """The norm before the map to logits."""
        return weights.stream_norm(config.names.norm, config.hidden_size, config.stream_eps, config.norm)

    def forward(
        self,
        token_ids_T: Tensor,
        positions_T: Tensor,
        caches: Sequence[LayerCache],
        rows: PagedRows,
        given_TD: Tensor | None = None,
    ) -> Tensor:
        """Compute these tokens and extend the caches; token ids and positions are int64. Returns the last layer's
        output, [T, D], or [R, D] with logits indices. ``given``: the output of the stage before, if this is not the
        first."""
        x_TD = self.embedded(token_ids_T, positions_T) if given_TD is None else given_TD
        if rows.images is not None and given_TD is None:
            x_TD = rows.images.put(x_TD)
        if isinstance(rows, RankRows):
            own_n = rows.own_n
            step = self.step(token_ids_T[own_n], positions_T[own_n], x_TD[own_n], rows.own)
        else:
            step = self.step(token_ids_T, positions_T, x_TD, rows)
        by_layer = rows.of_layers(len(self.layers))
        for index, layer, cache, own_rows in zip(self.own, self.layers, caches, by_layer, strict=True):
            x_TD = layer(x_TD, step, cache, own_rows)
            if rows.images is not None:
                x_TD = rows.images.deepen(index, x_TD, own_rows.logits_indices_R)
        return self.merged(x_TD)

    def merged(self, x_RX: Tensor) -> Tensor:
        """The last layer's output [R, D] of what is between layers; overridden by families with several residual
        streams."""
        return x_RX

    def embedded(self, token_ids_T: Tensor, positions_T: Tensor) -> Tensor:
        """The residual stream before the first layer, [T, D]."""
        x_TD = self.embedding(token_ids_T)
        if self.embedding_scale != 1.0:
            x_TD = ops.scaled(x_TD, self.embedding_scale)
        if self.positions is not None:
            x_TD = x_TD + self.positions(positions_T + self.config.first_position)
        return x_TD if self.embedding_norm is None else self.embedding_norm(x_TD)

    def step(self, token_ids_T: Tensor, positions_T: Tensor, x_TD: Tensor, rows: PagedRows) -> StepAngles:
        """What the layers need of the tokens and their positions."""
        angles = tuple(rotary(positions_T, rows.rope_shifts_AT) for rotary in self.rotaries)
        if (scale := self.config.query_scale) is None:
            return StepAngles(angles)
        factors_T1 = query_scale(positions_T, scale.beta, scale.period, scale.offset)
        return StepAngles(angles, factors_T1.to(x_TD.dtype))

    def logits(self, x_RD: Tensor) -> Tensor:
        """Logits of the next token [R, V], for rows returned by ``forward``."""
        logits_RV = self.head.of_normed(x_RD, self.norm)
        cap = self.config.final_softcap
        return ops.softcap(logits_RV, cap) if cap else logits_RV
