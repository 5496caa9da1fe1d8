"""The least time that one step of a dense model can take: its bytes over the bandwidth, its arithmetic over the peak.

A step reads every matrix once and the keys and values of every context once; the embedding table is only looked up.
Norms, biases and activations are left out: they are thousandths of that. (The roofline model: Williams, Waterman and
Patterson, "Roofline: an insightful visual performance model", CACM 52(4), 2009.)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from octavo.errors import ConfigError


class Shape(NamedTuple):
    """Dimensions that determine the bytes and the arithmetic of a dense decoder."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    ffn_matrices: int
    """3 with a gate, else 2."""
    vocab: int

    @property
    def matrix_weights(self) -> int:
        """Weights of the matrices that a step multiplies by, the head among them."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return self.layers * (attention + self.ffn_matrices * self.hidden * self.ffn) + self.hidden * self.vocab

    @property
    def last_weights(self) -> int:
        """Of these, weights used only by rows that sample: after the last layer's attention, including the head."""
        last_layer = self.hidden * self.head_dim * self.heads + self.ffn_matrices * self.hidden * self.ffn
        return last_layer + self.hidden * self.vocab

    @property
    def kv_values_per_token(self) -> int:
        """Number of keys and values per position of the context, in all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim


def shape_of(config: Mapping[str, Any]) -> Shape:
    """The shape in the keys of a ``config.json``; raise ``ConfigError`` for mixtures of experts and unknown kinds."""
    if any(config.get(key) for key in ("num_experts", "num_local_experts", "n_routed_experts")):
        raise ConfigError("roofline: a mixture of experts reads other weights in each step; give a dense model")
    try:
        if config.get("model_type") == "gpt2":
            hidden, heads = config["n_embd"], config["n_head"]
            ffn = config.get("n_inner") or 4 * hidden
            return Shape(config["n_layer"], hidden, heads, heads, hidden // heads, ffn, 2, config["vocab_size"])
        hidden, heads = config["hidden_size"], config["num_attention_heads"]
        return Shape(
            config["num_hidden_layers"],
            hidden,
            heads,
            config.get("num_key_value_heads") or heads,
            config.get("head_dim") or hidden // heads,
            config["intermediate_size"],
            3,
            config["vocab_size"],
        )
    except KeyError as error:
        raise ConfigError(f"roofline: the configuration has no {error.args[0]}") from None


class Work(NamedTuple):
    """Bytes and operations of one step."""

    bytes: int
    flops: int

    def floor_ms(self, bandwidth_tb_s: float, peak_tflop_s: float) -> float:
        """Milliseconds at these ceilings, with transfers and arithmetic fully overlapped."""
        return max(self.bytes / bandwidth_tb_s, self.flops / peak_tflop_s) / 1e9


def decode_work(shape: Shape, batch: int, context: int, weight_bytes: float = 2, kv_bytes: float = 2) -> Work:
    """One new token for each of ``batch`` sequences of ``context`` tokens; ``*_bytes`` are those of one value."""
    moved = shape.matrix_weights * weight_bytes + shape.kv_values_per_token * kv_bytes * batch * context
    scores_and_sums = 4 * shape.layers * shape.heads * shape.head_dim * context
    return Work(int(moved), batch * (2 * shape.matrix_weights + scores_and_sums))


def prefill_work(shape: Shape, tokens: int, weight_bytes: float = 2, kv_bytes: float = 2) -> Work:
    """A prompt of ``tokens`` tokens in one step; only its last token is computed after the last attention."""
    moved = shape.matrix_weights * weight_bytes + shape.kv_values_per_token * kv_bytes * tokens
    pairs = tokens * (tokens + 1) // 2
    flops = 2 * tokens * (shape.matrix_weights - shape.last_weights) + 2 * shape.last_weights
    return Work(int(moved), flops + 4 * shape.layers * shape.heads * shape.head_dim * pairs)
