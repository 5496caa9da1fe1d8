"""BERT (arXiv 1810.04805) and what keeps its layers: RoBERTa (arXiv 1907.11692), XLM-RoBERTa, CamemBERT, ELECTRA (arXiv
2003.10555), MPNet (arXiv 2004.09297) and DistilBERT (arXiv 1910.01108).

Post-norm layers, learned positions; the second text of a pair has a token type of its own. MPNet has biases of
attention scores by distance, and like DistilBERT no token types.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from octavo.layers.mlp import gelu, relu
from octavo.models.config_keys import ConfigKeys, wrong
from octavo.models.encoder import DistancePart, Encoder, EncoderConfig, read_encoder, under_names
from octavo.models.labels import LabelPart, read_activation, read_label_names, tanh
from octavo.models.parts import MLPPart, Names
from octavo.ops.moe import CappedSwish, ClampedSwish

BERT = Names(
    embedding="embeddings.word_embeddings",
    layers="encoder.layer",
    norm="",
    queries=("attention.self.query", "attention.self.key", "attention.self.value"),
    output="attention.output.dense",
    before_attention=None,
    after_attention="attention.output.LayerNorm",
    before_mlp=None,
    after_mlp="output.LayerNorm",
    ups=("intermediate.dense",),
    down="output.dense",
)
OTHER_HEADS = ("pooler.", "cls.", "lm_head.", "discriminator_predictions.", "generator_")
"""Heads of pre-training, and a pooler that nothing uses."""


def read_labels(keys: ConfigKeys, name: str, **of_texts: Any) -> LabelPart | None:
    """The head of a class of models, by its name: of texts, with the fields given, or of tokens; ``None`` without one.

    The latter is a linear map.
    """
    if not name.endswith(("ForSequenceClassification", "ForTokenClassification")):
        return None
    names = read_label_names(keys)
    fields: dict[str, Any] = {"names": names, "activation": read_activation(keys, len(names))}
    return LabelPart(**fields, **of_texts) if "ForSequence" in name else LabelPart(**fields, of="each")


def with_vocabulary_head(config: EncoderConfig, dense: str, norm: str, out: str) -> EncoderConfig:
    """With the head of a masked language model, if the checkpoint has one; names are those of its parts."""
    if not config.architecture.endswith("ForMaskedLM"):
        return config
    mlp, is_roberta = config.layers[0].mlp, config.root == "roberta."
    assert isinstance(mlp, MLPPart)
    between = gelu if is_roberta or isinstance(mlp.activation, str | CappedSwish | ClampedSwish) else mlp.activation
    head = LabelPart(names=(), activation="none", of="each", dense=dense, between=between, norm=norm, out=out)
    return dataclasses.replace(config, vocabulary=head)


def with_bert_embeddings(config: EncoderConfig, keys: ConfigKeys, *, num_types: int = 2) -> EncoderConfig:
    """With a norm and, where the configuration has them, token types."""
    return dataclasses.replace(
        config,
        embedding_norm="embeddings.LayerNorm",
        types="embeddings.token_type_embeddings",
        num_types=keys.size("type_vocab_size", num_types, low=0),
        left_out=OTHER_HEADS,
    )


def with_positions(
    config: EncoderConfig, first: int = 0, name: str = "embeddings.position_embeddings"
) -> EncoderConfig:
    """With learned positions, of which those before ``first`` are not used. Raises ``CheckpointError`` if all are."""
    most = config.max_position_embeddings
    if most <= first:
        raise wrong("max_position_embeddings", most, f"above {first}, the first position of a text")
    return dataclasses.replace(
        config, positions=name, num_positions=most, first_position=first, max_position_embeddings=most - first
    )


class BertModel(Encoder):
    """An encoder: BERT (arXiv 1810.04805)."""

    @classmethod
    def read_config(cls, keys: ConfigKeys, max_len: int | None) -> EncoderConfig:
        """Read the family's configuration. Raises ``CheckpointError`` naming a key that is missing, wrong or not
        supported."""
        config, head = read_bert(keys, "bert."), "cls.predictions"
        names = f"{head}.transform.dense", f"{head}.transform.LayerNorm", f"{head}.decoder"
        return cls.with_head(with_vocabulary_head(config, *names), keys)

    @classmethod
    def with_head(cls, config: EncoderConfig, keys: ConfigKeys) -> EncoderConfig:
        """With the classification head, if the checkpoint has one: the pooler and a map from its output."""
        labels = read_labels(keys, config.architecture, of="cls", dense=f"{config.root}pooler.dense", between=tanh)
        return dataclasses.replace(config, labels=labels)


def read_bert(keys: ConfigKeys, root: str, first_position: int = 0) -> EncoderConfig:
    """Read a BERT without its heads, whose names begin with ``root``."""
    keys.choice("position_embedding_type", {"absolute": None}, "absolute")
    config = with_bert_embeddings(read_encoder(keys, names=BERT), keys)
    return dataclasses.replace(with_positions(config, first_position), root=root)


class RobertaModel(BertModel):
    """An encoder: RoBERTa (arXiv 1907.11692), whose positions start after the padding token's id."""

    @classmethod
    def read_config(cls, keys: ConfigKeys, max_len: int | None) -> EncoderConfig:
        config = read_bert(keys, "roberta.", keys.size("pad_token_id", 1, low=0) + 1)
        config = with_vocabulary_head(config, "lm_head.dense", "lm_head.layer_norm", "lm_head.decoder")
        return cls.with_head(config, keys)

    @classmethod
    def with_head(cls, config: EncoderConfig, keys: ConfigKeys) -> EncoderConfig:
        head: dict[str, Any] = {"dense": "classifier.dense", "between": tanh, "out": "classifier.out_proj"}
        return dataclasses.replace(config, labels=read_labels(keys, config.architecture, of="cls", **head))


class ElectraModel(BertModel):
    """An encoder: ELECTRA (arXiv 2003.10555), whose embeddings may be narrower than the model."""

    @classmethod
    def read_config(cls, keys: ConfigKeys, max_len: int | None) -> EncoderConfig:
        keys.pass_over(
            "summary_activation", "summary_last_dropout", "summary_type", "summary_use_proj"
        )  # of multiple choice
        config = read_bert(keys, "electra.")
        config = dataclasses.replace(
            config, embedding_size=keys.size("embedding_size", 128), projection="embeddings_project"
        )
        head: dict[str, Any] = {"dense": "classifier.dense", "between": gelu, "out": "classifier.out_proj"}
        return dataclasses.replace(config, labels=read_labels(keys, config.architecture, of="cls", **head))


MPNET = BERT._replace(
    queries=("attention.attn.q", "attention.attn.k", "attention.attn.v"),
    output="attention.attn.o",
    after_attention="attention.LayerNorm",
)
MPNET_FIRST_POSITION = 2
MPNET_BUCKETS, MPNET_MAX_DISTANCE = 32, 128
"""Of distances; transformers counts so many whatever a configuration says."""


class MPNetModel(RobertaModel):
    """An encoder: MPNet (arXiv 2004.09297)."""

    @classmethod
    def read_config(cls, keys: ConfigKeys, max_len: int | None) -> EncoderConfig:
        keys.must_be({"relative_attention_num_buckets": (MPNET_BUCKETS,)})
        config = dataclasses.replace(
            with_positions(read_encoder(keys, names=MPNET), MPNET_FIRST_POSITION),
            root="mpnet.",
            embedding_norm="embeddings.LayerNorm",
            distances=DistancePart("encoder.relative_attention_bias", MPNET_BUCKETS, MPNET_MAX_DISTANCE),
            left_out=OTHER_HEADS,
        )
        return cls.with_head(config, keys)


DISTILBERT = BERT._replace(
    layers="transformer.layer",
    queries=("attention.q_lin", "attention.k_lin", "attention.v_lin"),
    output="attention.out_lin",
    after_attention="sa_layer_norm",
    after_mlp="output_layer_norm",
    ups=("ffn.lin1",),
    down="ffn.lin2",
)
DISTILBERT_SIZES = {
    "hidden_size": "dim",
    "intermediate_size": "hidden_dim",
    "num_attention_heads": "n_heads",
    "num_hidden_layers": "n_layers",
}


class DistilBertModel(Encoder):
    """An encoder: DistilBERT (arXiv 1910.01108)."""

    @classmethod
    def read_config(cls, keys: ConfigKeys, max_len: int | None) -> EncoderConfig:
        keys.pass_over(
            "dropout", "qa_dropout", "seq_classif_dropout", "sinusoidal_pos_embds"
        )  # of training; sinusoidal positions are stored like learned ones
        config = read_encoder(under_names(keys, DISTILBERT_SIZES), names=DISTILBERT, activation_key="activation")
        config = dataclasses.replace(
            with_positions(config),
            root="distilbert.",
            embedding_norm="embeddings.LayerNorm",
            left_out=(*OTHER_HEADS, "vocab_"),
        )
        names = "vocab_transform", "vocab_layer_norm", "vocab_projector"
        config = with_vocabulary_head(config, *names)
        labels = read_labels(keys, config.architecture, of="cls", dense="pre_classifier", between=relu)
        return dataclasses.replace(config, labels=labels)
