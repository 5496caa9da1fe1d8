"""DistilBERT (arXiv 1910.01108): BERT with half the layers, and without token types."""

from __future__ import annotations

import dataclasses

from octavo.layers.mlp import relu
from octavo.models.bert import OTHER_HEADS, read_labels, with_positions
from octavo.models.config_keys import ConfigKeys
from octavo.models.encoder import Encoder, EncoderConfig, read_encoder, under_names
from octavo.models.parts import Names

NAMES = Names(
    embedding="embeddings.word_embeddings",
    layers="transformer.layer",
    norm="",
    queries=("attention.q_lin", "attention.k_lin", "attention.v_lin"),
    output="attention.out_lin",
    before_attention=None,
    after_attention="sa_layer_norm",
    before_mlp=None,
    after_mlp="output_layer_norm",
    ups=("ffn.lin1",),
    down="ffn.lin2",
)
SIZES = {
    "hidden_size": "dim",
    "intermediate_size": "hidden_dim",
    "num_attention_heads": "n_heads",
    "num_hidden_layers": "n_layers",
}


class DistilBertModel(Encoder):
    """An encoder: DistilBERT (arXiv 1910.01108)."""

    @classmethod
    def read_config(cls, keys: ConfigKeys, max_len: int | None) -> EncoderConfig:
        for key in ("dropout", "qa_dropout", "seq_classif_dropout", "sinusoidal_pos_embds"):
            keys.get(key)  # of training; sinusoidal positions are stored like learned ones
        config = read_encoder(under_names(keys, SIZES), names=NAMES, activation_key="activation")
        config = dataclasses.replace(
            with_positions(config),
            root="distilbert.",
            embedding_norm="embeddings.LayerNorm",
            left_out=(*OTHER_HEADS, "vocab_"),
        )
        labels = read_labels(keys, config.architecture, of="cls", dense="pre_classifier", between=relu)
        return dataclasses.replace(config, labels=labels)
