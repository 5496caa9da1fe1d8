"""MPNet (arXiv 2004.09297): RoBERTa with biases of attention scores by distance, and without token types."""

from __future__ import annotations

import dataclasses

from octavo.models.bert import BERT, OTHER_HEADS, RobertaModel, with_positions
from octavo.models.config_keys import ConfigKeys
from octavo.models.encoder import DistancePart, EncoderConfig, read_encoder

NAMES = BERT._replace(
    queries=("attention.attn.q", "attention.attn.k", "attention.attn.v"),
    output="attention.attn.o",
    after_attention="attention.LayerNorm",
)
FIRST_POSITION = 2
MAX_DISTANCE = 128


class MPNetModel(RobertaModel):
    """An encoder: MPNet (arXiv 2004.09297)."""

    @classmethod
    def read_config(cls, keys: ConfigKeys, max_len: int | None) -> EncoderConfig:
        config = dataclasses.replace(
            with_positions(read_encoder(keys, names=NAMES), FIRST_POSITION),
            root="mpnet.",
            embedding_norm="embeddings.LayerNorm",
            distances=DistancePart(
                "encoder.relative_attention_bias", keys.size("relative_attention_num_buckets", 32, low=8), MAX_DISTANCE
            ),
            left_out=OTHER_HEADS,
        )
        return cls.with_head(config, keys)
