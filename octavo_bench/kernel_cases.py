"""The linear maps of models, as cases for measuring the kernels that compute them."""

from __future__ import annotations

from octavo.errors import ConfigError
from octavo.sim.roofline import shape_of
from octavo.sim.shapes import SHAPES
from octavo_bench.linear_case import LinearCase


def layer_cases(model: str) -> list[LinearCase]:
    """The linear maps of a layer of a model that ``SHAPES`` names, in their order.

    Raises ``ConfigError`` for a model that is not there, or has no gated feed-forward part.
    """
    if model not in SHAPES:
        raise ConfigError(f"model: {model!r} is not one of {', '.join(SHAPES)}")
    shape = shape_of(SHAPES[model])
    if shape.ffn_matrices != 3:
        raise ConfigError(f"model: {model} has no gated feed-forward part; kernels are measured for those that have")
    hidden, width = shape.hidden, shape.heads * shape.head_dim
    return [
        LinearCase(model, "qkv", width + 2 * shape.kv_heads * shape.head_dim, hidden, has_norm=True),
        LinearCase(model, "o", hidden, width, has_residual=True),
        LinearCase(model, "gate_up", 2 * shape.ffn, hidden, has_norm=True, activation="silu"),
        LinearCase(model, "down", hidden, shape.ffn, has_residual=True),
    ]


def head_case(model: str) -> LinearCase:
    """The map from the last hidden state to the logits."""
    shape = shape_of(SHAPES[model])
    return LinearCase(model, "lm_head", shape.vocab, shape.hidden, has_norm=True)
