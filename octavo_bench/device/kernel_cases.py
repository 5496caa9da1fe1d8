"""The linear maps of models, as cases for measuring the kernels that compute them."""

from __future__ import annotations

from typing import NamedTuple

from octavo.errors import ConfigError
from octavo.ops.linear.linear import Activation
from octavo_bench.device.linear_case import LinearCase
from octavo_fleet.sim.costs.roofline import shape_of
from octavo_fleet.sim.shapes import SHAPES


class MatrixSizes(NamedTuple):
    """What decides the matrices of a model."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    activation: Activation = "silu"
    norms_outputs: bool = False
    """Whether a norm stands between a block's output and the residual, so that the residual is not fused."""


def sizes_of(model: str) -> MatrixSizes:
    """The sizes of a model that ``SHAPES`` names.

    Raises ``ConfigError`` for a model that is not there, or has no dense gated feed-forward part.
    """
    if model not in SHAPES:
        raise ConfigError(f"model: {model!r} is not one of {', '.join(SHAPES)}")
    shape = shape_of(SHAPES[model])
    if shape.mixture is not None:
        raise ConfigError(f"model: the feed-forward parts of {model} are experts; kernels are measured for dense ones")
    if shape.recurrent is not None:
        raise ConfigError(f"model: {model} has recurrent layers, which `octavo bench recurrences` measures")
    if shape.ffn_matrices != 3:
        raise ConfigError(f"model: {model} has no gated feed-forward part; kernels are measured for those that have")
    sizes = MatrixSizes(shape.hidden, shape.heads, shape.kv_heads, shape.head_dim, shape.ffn, shape.vocab)
    is_gemma = SHAPES[model]["model_type"] == "gemma3_text"
    return sizes._replace(activation="gelu_tanh", norms_outputs=True) if is_gemma else sizes


def layer_cases(model: str) -> list[LinearCase]:
    """The linear maps of a layer of a model, in their order. Raises ``ConfigError``, see ``sizes_of``."""
    sizes = sizes_of(model)
    hidden, width, joins = sizes.hidden, sizes.heads * sizes.head_dim, not sizes.norms_outputs
    return [
        LinearCase(model, "qkv", width + 2 * sizes.kv_heads * sizes.head_dim, hidden, has_norm=True),
        LinearCase(model, "o", hidden, width, has_residual=joins),
        LinearCase(model, "gate_up", 2 * sizes.ffn, hidden, has_norm=True, activation=sizes.activation),
        LinearCase(model, "down", hidden, sizes.ffn, has_residual=joins),
    ]


def head_case(model: str) -> LinearCase:
    """The map from the last hidden state to the logits."""
    sizes = sizes_of(model)
    return LinearCase(model, "lm_head", sizes.vocab, sizes.hidden, has_norm=True)
