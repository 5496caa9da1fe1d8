"""BERT (arXiv 1810.04805) as an encoder of texts, and as a cross-encoder that scores one text or a pair.

Post-norm layers, learned positions; the second text of a pair has a token type of its own.

Shapes: T tokens of several texts, S texts, D model, L labels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from octavo import ops
from octavo.layers.linear import Linear
from octavo.models.config import ModelConfig, architecture
from octavo.models.keys import ConfigKeys, wrong
from octavo.models.loader import WeightLoader
from octavo.ops.attention import HeadLayout
from octavo.ops.elementwise import sigmoid

GELUS = {"gelu": False, "gelu_python": False, "gelu_new": True, "gelu_pytorch_tanh": True, "gelu_fast": True}
"""Names of GELU, and whether each is the tanh approximation."""


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


@dataclass(frozen=True, kw_only=True)
class EncoderConfig(ModelConfig):
    """The configuration of BERT and of its variants."""

    num_types: int
    first_position: int = 0
    """Row of position 0 in the position embeddings; rows before it are unused."""
    is_approximate: bool
    """Whether GELU is the tanh approximation."""
    is_cross_encoder: bool
    """Whether the model is a cross-encoder, which returns scores instead of embeddings."""
    squashes: bool
    """Whether scores pass through a sigmoid."""


def read_bert(keys: ConfigKeys, *, first_position: int = 0) -> EncoderConfig:
    """Read BERT's configuration. Raises ``CheckpointError`` naming a key that is missing, wrong or not supported."""
    hidden_size, num_heads = keys.size("hidden_size"), keys.size("num_attention_heads")
    if hidden_size % num_heads:
        raise wrong("hidden_size", hidden_size, f"a multiple of num_attention_heads, {num_heads}")
    if keys.flag("is_decoder"):
        raise wrong("is_decoder", True, "false: encoder attention is bidirectional")
    keys.choice("position_embedding_type", {"absolute": None}, "absolute")
    for key in ("classifier_dropout", "hidden_dropout_prob", "attention_probs_dropout_prob", "gradient_checkpointing"):
        keys.get(key)  # used in training only
    keys.get("eos_token_id")  # the tokenizer adds it to the text
    name = architecture(keys)
    is_cross_encoder = name.endswith("ForSequenceClassification")
    if is_cross_encoder and (count := keys.size("num_labels", len(keys.get("id2label", {0: "", 1: ""})))) != 1:
        raise wrong("num_labels", count, "1: only models with one label can score texts")
    return EncoderConfig(
        architecture=name,
        vocab_size=keys.size("vocab_size"),
        hidden_size=hidden_size,
        ffn_size=keys.size("intermediate_size"),
        num_layers=keys.size("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=hidden_size // num_heads,
        norm_eps=keys.number("layer_norm_eps", 1e-12),
        max_position_embeddings=keys.size("max_position_embeddings", 512, low=first_position + 1) - first_position,
        tie_word_embeddings=keys.flag("tie_word_embeddings", True),
        eos_token_ids=(),
        num_types=keys.size("type_vocab_size", 2),
        first_position=first_position,
        is_approximate=keys.choice("hidden_act", GELUS, "gelu"),
        is_cross_encoder=is_cross_encoder,
        squashes=_squashes(keys),
    )


def _squashes(keys: ConfigKeys) -> bool:
    """Whether sentence-transformers applies a sigmoid to the score: by default, unless the configuration says not."""
    newer = keys.child("sentence_transformers")
    name = newer.get("activation_fn") if newer is not None else keys.get("sbert_ce_default_activation_function")
    known = {"Sigmoid": True, "Identity": False}
    kind = str(name or "Sigmoid").rpartition(".")[2]
    if kind not in known:
        raise wrong("sentence_transformers.activation_fn", name, "Sigmoid or Identity")
    return known[kind]


class BertLayer:
    """Attention, then the feed-forward layer; each adds to its input and normalises the sum."""

    def __init__(self, config: EncoderConfig, weights: WeightLoader, prefix: str) -> None:
        D, F, eps = config.hidden_size, config.ffn_size, config.norm_eps
        names = [f"{prefix}.attention.self.{part}" for part in ("query", "key", "value")]
        heads = HeadLayout(config.num_heads, config.num_kv_heads, config.head_dim, config.head_dim**-0.5)
        self.config = config
        self.qkv_proj = weights.qkv(names, heads, D, True)
        self.o_proj = weights.row(f"{prefix}.attention.output.dense", D, D, True)
        self.attention_norm = weights.layer_norm(f"{prefix}.attention.output.LayerNorm", D, eps)
        self.up = weights.column(f"{prefix}.intermediate.dense", F, D, True)
        self.down = weights.row(f"{prefix}.output.dense", D, F, True)
        self.output_norm = weights.layer_norm(f"{prefix}.output.LayerNorm", D, eps)

    def __call__(self, x_TD: Tensor, ends: list[int]) -> Tensor:
        attended_TD = ops.encoder_attention(self.qkv_proj(x_TD), self.config.num_heads, ends)
        x_TD = self.attention_norm(self.o_proj(attended_TD, residual=x_TD))
        return self.output_norm(self.down(ops.gelu(self.up(x_TD), self.config.is_approximate), residual=x_TD))


class BertModel:
    """Computes the token vectors of texts."""

    root = "bert."

    @classmethod
    def read_config(cls, keys: ConfigKeys, max_len: int | None) -> EncoderConfig:
        return read_bert(keys)

    def __init__(self, config: EncoderConfig, weights: WeightLoader) -> None:
        self.config = config
        D = config.hidden_size
        start = (
            self.root
            if config.is_cross_encoder or weights.tensors.has(f"{self.root}embeddings.word_embeddings.weight")
            else ""
        )
        self.embedding = weights.embedding(f"{start}embeddings.word_embeddings", config.vocab_size, D)
        num_positions = config.first_position + config.max_position_embeddings
        self.positions = weights.small_embedding(f"{start}embeddings.position_embeddings", num_positions, D)
        self.types = weights.small_embedding(f"{start}embeddings.token_type_embeddings", config.num_types, D)
        self.norm = weights.layer_norm(f"{start}embeddings.LayerNorm", D, config.norm_eps)
        layers = range(config.num_layers)
        self.layers = [BertLayer(config, weights, f"{start}encoder.layer.{i}") for i in layers]
        weights.tensors.leave_out(f"{start}embeddings.position_ids")
        self.head = self.read_head(weights) if config.is_cross_encoder else None
        if self.head is None:
            weights.tensors.leave_out(f"{start}pooler.")
            for head in ("cls.", "lm_head."):  # pre-training heads
                weights.tensors.leave_out(head)

    def read_head(self, weights: WeightLoader) -> tuple[Linear, Linear]:
        """The classification head: the pooler for a text's first vector, and the map from its output to the score."""
        D = self.config.hidden_size
        pooler = weights.replicated(f"{self.root}pooler.dense", D, D, True)
        return pooler, weights.replicated("classifier", 1, D, True)

    def forward(self, texts: PackedTexts) -> Tensor:
        """The vectors of all tokens [T, D]."""
        types_T = texts.types_T.clamp(max=self.config.num_types - 1)
        positions_T = texts.positions_T + self.config.first_position
        x_TD = self.embedding(texts.token_ids_T) + self.types(types_T) + self.positions(positions_T)
        x_TD = self.norm(x_TD)
        for layer in self.layers:
            x_TD = layer(x_TD, texts.ends)
        return x_TD

    def scores(self, first_SD: Tensor) -> Tensor:
        """The score of each text [S] in float32, from its first token's vector; requires ``is_cross_encoder``."""
        assert self.head is not None, "this model has no classification head"
        dense, out = self.head
        logits_S = out(torch.tanh(dense(first_SD)))[:, 0].float()
        return sigmoid(logits_S) if self.config.squashes else logits_S
