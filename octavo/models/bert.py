"""BERT (arXiv 1810.04805) as an encoder of texts, and as a judge of one text or of two.

Each sublayer's output is added to its input and normalised after that. Learned positions; a text's second part, if
there is one, has a token type of its own.

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

GELUS = {"gelu": False, "gelu_python": False, "gelu_new": True, "gelu_pytorch_tanh": True, "gelu_fast": True}
"""Names of GELU, and whether it is the approximate one."""


class Texts(NamedTuple):
    """Whole texts, one after the other."""

    token_ids_T: Tensor
    """int64."""
    positions_T: Tensor
    """int64, from 0 in each text."""
    types_T: Tensor
    """int64: 0, and 1 in the second part of a text of two."""
    ends: list[int]
    """Where each text's rows end."""


@dataclass(frozen=True, kw_only=True)
class EncoderConfig(ModelConfig):
    """The shape and arithmetic of BERT and of encoders that differ little."""

    num_types: int
    first_position: int = 0
    """Index of the first position's row in the table of positions, whose rows before it are not used."""
    is_approximate: bool
    """The form of GELU."""
    is_judge: bool
    """Whether it gives scores instead of vectors."""
    squashes: bool
    """Scores go through the logistic function."""


def read_bert(keys: ConfigKeys, *, first_position: int = 0) -> EncoderConfig:
    """The keys of BERT. Raises ``CheckpointError`` for what is missing, wrong or not supported, naming the key."""
    hidden_size, num_heads = keys.size("hidden_size"), keys.size("num_attention_heads")
    if hidden_size % num_heads:
        raise wrong("hidden_size", hidden_size, f"a multiple of num_attention_heads, {num_heads}")
    if keys.flag("is_decoder"):
        raise wrong("is_decoder", True, "false: texts are seen as a whole")
    keys.choice("position_embedding_type", {"absolute": None}, "absolute")
    for key in ("classifier_dropout", "hidden_dropout_prob", "attention_probs_dropout_prob", "gradient_checkpointing"):
        keys.get(key)  # of training
    keys.get("eos_token_id")  # it is in the text
    name = architecture(keys)
    is_judge = name.endswith("ForSequenceClassification")
    if is_judge and (count := keys.size("num_labels", len(keys.get("id2label", {0: "", 1: ""})))) != 1:
        raise wrong("num_labels", count, "1: scores are made by models of one label")
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
        is_judge=is_judge,
        squashes=_squashes(keys),
    )


def _squashes(keys: ConfigKeys) -> bool:
    """What sentence-transformers does with the scores of one label: the logistic function, or what it wrote down."""
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
    """Token vectors of whole texts."""

    root = "bert."

    @classmethod
    def read_config(cls, keys: ConfigKeys, max_len: int | None) -> EncoderConfig:
        return read_bert(keys)

    def __init__(self, config: EncoderConfig, weights: WeightLoader) -> None:
        self.config = config
        D = config.hidden_size
        start = (
            self.root if config.is_judge or weights.tensors.has(f"{self.root}embeddings.word_embeddings.weight") else ""
        )
        self.embedding = weights.embedding(f"{start}embeddings.word_embeddings", config.vocab_size, D)
        num_positions = config.first_position + config.max_position_embeddings
        self.positions = weights.small_embedding(f"{start}embeddings.position_embeddings", num_positions, D)
        self.types = weights.small_embedding(f"{start}embeddings.token_type_embeddings", config.num_types, D)
        self.norm = weights.layer_norm(f"{start}embeddings.LayerNorm", D, config.norm_eps)
        layers = range(config.num_layers)
        self.layers = [BertLayer(config, weights, f"{start}encoder.layer.{i}") for i in layers]
        weights.tensors.leave_out(f"{start}embeddings.position_ids")
        self.head = self.read_head(weights) if config.is_judge else None
        if self.head is None:
            weights.tensors.leave_out(f"{start}pooler.")
            for head in ("cls.", "lm_head."):  # what it was trained with
                weights.tensors.leave_out(head)

    def read_head(self, weights: WeightLoader) -> tuple[Linear, Linear]:
        """From a text's first vector to what the score is made of, and from there to the score."""
        D = self.config.hidden_size
        pooler = weights.replicated(f"{self.root}pooler.dense", D, D, True)
        return pooler, weights.replicated("classifier", 1, D, True)

    def forward(self, texts: Texts) -> Tensor:
        """The vectors of all tokens [T, D]."""
        types_T = texts.types_T.clamp(max=self.config.num_types - 1)
        positions_T = texts.positions_T + self.config.first_position
        x_TD = self.embedding(texts.token_ids_T) + self.types(types_T) + self.positions(positions_T)
        x_TD = self.norm(x_TD)
        for layer in self.layers:
            x_TD = layer(x_TD, texts.ends)
        return x_TD

    def scores(self, first_SD: Tensor) -> Tensor:
        """The score of each text [S] in float32, from the vectors of the first tokens; only of a judge."""
        assert self.head is not None, "this model gives no scores"
        dense, out = self.head
        logits_S = out(torch.tanh(dense(first_SD)))[:, 0].float()
        return torch.sigmoid(logits_S) if self.config.squashes else logits_S
