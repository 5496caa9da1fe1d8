"""The least time that one step of a model can take: its bytes over the bandwidth, its arithmetic over the peak.

A step reads every matrix once, of a mixture of experts those that some token uses, and the keys and values (or
latents) of every context once; it reads and writes the recurrent state of every sequence; the embedding table is only
looked up. Norms, biases and activations are left out: they are thousandths of that. (The roofline model: Williams,
Waterman and Patterson, "Roofline: an insightful visual performance model", CACM 52(4), 2009.)
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from octavo.errors import ConfigError
from octavo.models.multimodal_text import text_config


class MixtureShape(NamedTuple):
    """The layers whose feed-forward part is a mixture of experts."""

    layers: int
    experts: int
    chosen: int
    """Experts that a token uses."""
    ffn: int
    """Width of an expert."""
    shared_ffn: int = 0
    """Width of the expert that all tokens use in addition."""
    shared_gate: int = 0
    """1 if it has a gate of its own."""

    def experts_read(self, tokens: float) -> float:
        """Experts that a step of ``tokens`` tokens reads, on average if each token's choice is equally likely."""
        return self.experts * (1 - float((1 - self.chosen / self.experts) ** tokens))


class Latent(NamedTuple):
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): keys and values of all heads are maps of a latent.

    Queries and outputs take these maps over, so that a position is one cached vector: the latent, which is the value
    too, and a rotated part of the key.
    """

    rank: int
    """Width of the latent."""
    rotated: int
    plain: int
    """Width of the part of a query that is mapped to the latent space."""
    value: int
    query_rank: int
    """Rank of the query projection; 0 if it has none."""


class Recurrent(NamedTuple):
    """The layers that keep a recurrent state."""

    layers: int
    weights: int
    """Of a layer's maps, that to its output among them."""
    output_weights: int
    numbers: int
    """Of a layer's state of a sequence, in float32."""
    inputs: int
    """Inputs of its convolution that it keeps for a sequence."""
    flops: int
    """Operations of a token in a layer, its maps aside."""

    @property
    def state_bytes(self) -> int:
        """Of a sequence, in all layers, with inputs of 16 bits."""
        return self.layers * (4 * self.numbers + 2 * self.inputs)


class Shape(NamedTuple):
    """Dimensions that determine the bytes and the arithmetic of a decoder."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    """1 with latent attention."""
    head_dim: int
    """With latent attention, the width of a cached vector."""
    ffn: int
    """Width of a feed-forward part without experts."""
    ffn_matrices: int
    """3 with a gate, else 2."""
    vocab: int
    mixture: MixtureShape | None = None
    latent: Latent | None = None
    recurrent: Recurrent | None = None
    attention_layers: int | None = None
    """Layers with attention; ``None``: all."""
    dense_layers: int | None = None
    """Layers with a feed-forward part without experts; ``None``: all that have no experts."""
    gates_output: bool = False
    """Whether each head has a gate as wide as its query."""

    @property
    def matrix_weights(self) -> int:
        """Weights of all matrices but the embedding table, the head among them."""
        return int(self.weights_read(math.inf))

    @property
    def active_weights(self) -> int:
        """Weights that one token is multiplied by."""
        return round(self.weights_read(1))

    @property
    def kv_values_per_token(self) -> int:
        """Number of keys and values per position of the context, in all layers."""
        tensors = 2 if self.latent is None else 1
        return tensors * self._num_attending * self.kv_heads * self.head_dim

    @property
    def _num_attending(self) -> int:
        return self.layers if self.attention_layers is None else self.attention_layers

    @property
    def pair_flops(self) -> int:
        """Operations of a token for a position of its context, in all layers: each head's score and weighted sum."""
        value = self.head_dim if self.latent is None else self.latent.rank
        return 2 * self._num_attending * self.heads * (self.head_dim + value)

    @property
    def state_bytes(self) -> int:
        """Of the recurrent state of a sequence; 0 without any."""
        return 0 if self.recurrent is None else self.recurrent.state_bytes

    @property
    def state_flops(self) -> int:
        """Operations of a token on recurrent states, in all layers."""
        return 0 if self.recurrent is None else self.recurrent.layers * self.recurrent.flops

    def weights_read(self, tokens: float) -> float:
        """Weights that a step of ``tokens`` tokens reads, which all sample."""
        num_sparse = 0 if self.mixture is None else self.mixture.layers
        num_dense = self.layers - num_sparse if self.dense_layers is None else self.dense_layers
        dense = num_dense * self._ffn_weights(tokens, is_sparse=False)
        sparse = num_sparse * self._ffn_weights(tokens, is_sparse=True)
        attention = self._input_weights() + self._output_weights()
        recurrent = 0 if self.recurrent is None else self.recurrent.layers * self.recurrent.weights
        return self._num_attending * attention + recurrent + dense + sparse + self.hidden * self.vocab

    def last_weights_read(self, tokens: float) -> float:
        """Of these, weights used only by tokens that sample: after the last layer's attention, including the head."""
        ffn = self._ffn_weights(tokens, is_sparse=self.mixture is not None)
        return self._output_weights() + ffn + self.hidden * self.vocab

    def _input_weights(self) -> int:
        """Weights of a layer before its attention."""
        if self.latent is None:
            return self.hidden * self.head_dim * (self.heads * (1 + self.gates_output) + 2 * self.kv_heads)
        rank, rotated, plain, _, query_rank = self.latent
        queries = self.heads * (plain + rotated)
        query = query_rank * (self.hidden + queries) if query_rank else self.hidden * queries
        return query + self.hidden * self.head_dim + self.heads * plain * rank

    def _output_weights(self) -> int:
        """Weights of a layer between its attention and its feed-forward part."""
        if self.latent is None:
            return self.hidden * self.head_dim * self.heads
        return self.heads * self.latent.value * (self.latent.rank + self.hidden)

    def _ffn_weights(self, tokens: float, is_sparse: bool) -> float:
        if not is_sparse or self.mixture is None:
            return self.ffn_matrices * self.hidden * self.ffn
        width = self.mixture.experts_read(tokens) * self.mixture.ffn + self.mixture.shared_ffn
        gate = self.mixture.shared_gate
        return self.hidden * (self.mixture.experts + gate + self.ffn_matrices * width)


def shape_of(config: Mapping[str, Any]) -> Shape:
    """The shape in the keys of a ``config.json``, of its text part alone; raise ``ConfigError`` for unknown kinds."""
    config = text_config(config)
    try:
        if config.get("model_type") == "gpt2":
            hidden, heads = config["n_embd"], config["n_head"]
            ffn = config.get("n_inner") or 4 * hidden
            return Shape(config["n_layer"], hidden, heads, heads, hidden // heads, ffn, 2, config["vocab_size"])
        if config.get("model_type") == "nemotron_h":
            return _nemotron_h(config)
        hidden, heads, latent = config["hidden_size"], config["num_attention_heads"], _latent_of(config)
        kv_heads, head_dim = config.get("num_key_value_heads") or heads, config.get("head_dim") or hidden // heads
        if latent is not None:
            kv_heads, head_dim = 1, latent.rank + latent.rotated
        recurrent, mixture = _delta_of(config), _mixture_of(config)
        return Shape(
            config["num_hidden_layers"],
            hidden,
            heads,
            kv_heads,
            head_dim,
            config["intermediate_size"] if mixture is None else config.get("intermediate_size", 0),
            3,
            config["vocab_size"],
            mixture,
            latent,
            recurrent,
            None if recurrent is None else config["num_hidden_layers"] - recurrent.layers,
            gates_output=recurrent is not None,
        )
    except KeyError as error:
        raise ConfigError(f"roofline: the configuration has no {error.args[0]}") from None


KINDS = {"full_attention", "sliding_attention", "chunked_attention", "linear_attention"}


def _delta_of(config: Mapping[str, Any]) -> Recurrent | None:
    """The layers with the gated delta rule of Qwen3-Next and Qwen3.5."""
    num_layers, every = config["num_hidden_layers"], config.get("full_attention_interval") or 4
    is_known = str(config.get("model_type")).startswith(("qwen3_next", "qwen3_5"))
    kinds = config.get("layer_types") or ["full_attention"] * num_layers
    if is_known and not config.get("layer_types"):
        kinds = ["linear_attention" if (i + 1) % every else "full_attention" for i in range(num_layers)]
    count = kinds.count("linear_attention")
    if set(kinds) - KINDS or (count and not is_known):
        found = f"{', '.join(sorted(set(kinds)))} of {config.get('model_type')}"
        raise ConfigError(f"roofline: layers of kinds {found} are not counted")
    if not count:
        return None
    hidden, key_heads, heads = config["hidden_size"], config["linear_num_key_heads"], config["linear_num_value_heads"]
    key_dim, value_dim = config["linear_key_head_dim"], config["linear_value_head_dim"]
    keys, values, width = key_heads * key_dim, heads * value_dim, config["linear_conv_kernel_dim"]
    output = hidden * values
    maps = hidden * (2 * keys + 2 * values + 2 * heads) + output + (2 * keys + values) * width
    numbers = heads * key_dim * value_dim
    return Recurrent(count, maps, output, numbers, (width - 1) * (2 * keys + values), 8 * numbers)


def _nemotron_h(config: Mapping[str, Any]) -> Shape:
    """Layers of one part each: Mamba-2, attention, or a feed-forward part of two matrices, with experts or without."""
    kinds, hidden, heads = config["layers_block_type"], config["hidden_size"], config["mamba_num_heads"]
    inner, K, width = heads * config["mamba_head_dim"], config["ssm_state_size"], config["conv_kernel"]
    channels, output = inner + 2 * config["n_groups"] * K, hidden * inner
    maps = hidden * (inner + channels + heads) + output + channels * width
    of_states = kinds.count("linear_attention")
    if kinds.count("moe"):
        raise ConfigError("roofline: the experts of nemotron_h are not counted")
    return Shape(
        len(kinds),
        hidden,
        config["num_attention_heads"],
        config["num_key_value_heads"],
        config["head_dim"],
        config["intermediate_size"],
        2,
        config["vocab_size"],
        recurrent=Recurrent(of_states, maps, output, inner * K, (width - 1) * channels, 6 * inner * K),
        attention_layers=kinds.count("full_attention"),
        dense_layers=kinds.count("mlp"),
    )


def _latent_of(config: Mapping[str, Any]) -> Latent | None:
    rank = config.get("kv_lora_rank")
    if not rank:
        return None
    rotated, plain, value = (config[key] for key in ("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"))
    return Latent(rank, rotated, plain, value, config.get("q_lora_rank") or 0)


def _mixture_of(config: Mapping[str, Any]) -> MixtureShape | None:
    keys = ("num_experts", "num_local_experts", "n_routed_experts")
    experts = next((config[key] for key in keys if config.get(key)), None)
    if experts is None:
        return None
    ffn = config.get("moe_intermediate_size") or config["intermediate_size"]
    own = config.get("shared_expert_intermediate_size")
    shared = own or ffn * (config.get("n_shared_experts") or 0)
    step, dense = config.get("decoder_sparse_step") or 1, set(config.get("mlp_only_layers") or ())
    dense |= set(range(config.get("first_k_dense_replace") or 0))
    layers = sum(i not in dense and (i + 1) % step == 0 for i in range(config["num_hidden_layers"]))
    return MixtureShape(layers, experts, config["num_experts_per_tok"], ffn, shared, int(bool(own)))


class DecodeWork(NamedTuple):
    """Bytes and operations of one step."""

    bytes: int
    flops: int


def decode_work(shape: Shape, batch: int, context: int, weight_bytes: float = 2, kv_bytes: float = 2) -> DecodeWork:
    """One new token for each of ``batch`` sequences of ``context`` tokens; ``*_bytes`` are those of one value."""
    moved = shape.weights_read(batch) * weight_bytes + shape.kv_values_per_token * kv_bytes * batch * context
    moved += 2 * batch * shape.state_bytes
    of_token = 2 * shape.active_weights + shape.state_flops + shape.pair_flops * context
    return DecodeWork(round(moved), batch * of_token)


def prefill_work(shape: Shape, tokens: int, weight_bytes: float = 2, kv_bytes: float = 2) -> DecodeWork:
    """A prompt of ``tokens`` tokens in one step; only its last token is computed after the last attention."""
    weights = shape.weights_read(tokens) - shape.last_weights_read(tokens) + shape.last_weights_read(1)
    moved = weights * weight_bytes + shape.kv_values_per_token * kv_bytes * tokens + 2 * shape.state_bytes
    pairs = tokens * (tokens + 1) // 2
    last = round(shape.last_weights_read(1))
    flops = 2 * tokens * (shape.active_weights - last) + 2 * last + tokens * shape.state_flops
    return DecodeWork(round(moved), flops + shape.pair_flops * pairs)
