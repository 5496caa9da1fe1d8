"""The encoder of T5 (arXiv 1910.10683): pre-norm layers with biases of attention scores by distance, which are not
scaled otherwise, and no positions.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from octavo.layers.mlp import gelu, gelu_tanh, relu
from octavo.models.config_keys import ConfigKeys
from octavo.models.encoder import DistancePart, Encoder, EncoderConfig, read_encoder, under_names
from octavo.models.parts import RMS, Names

NAMES = Names(
    embedding="shared",
    layers="encoder.block",
    norm="encoder.final_layer_norm",
    queries=("layer.0.SelfAttention.q", "layer.0.SelfAttention.k", "layer.0.SelfAttention.v"),
    output="layer.0.SelfAttention.o",
    before_attention="layer.0.layer_norm",
    before_mlp="layer.1.layer_norm",
    ups=("layer.1.DenseReluDense.wi",),
    down="layer.1.DenseReluDense.wo",
)
SIZES = {
    "hidden_size": "d_model",
    "head_dim": "d_kv",
    "intermediate_size": "d_ff",
    "num_attention_heads": "num_heads",
    "num_hidden_layers": "num_layers",
    "max_position_embeddings": "n_positions",
}
ACTIVATIONS: dict[str, Any] = {
    "relu": relu,
    "gelu": gelu,
    "gelu_new": gelu_tanh,
    "gated-gelu": "gelu_tanh",
    "gated-silu": "silu",
}
"""Of layers without gates a function, of those with gates a name."""
UNUSED = (
    *("classifier_dropout", "dense_act_fn", "dropout_rate", "is_encoder_decoder", "is_gated_act", "num_decoder_layers"),
    *("output_past", "scale_decoder_outputs"),
)


class T5EncoderModel(Encoder):
    """An encoder: that of T5 (arXiv 1910.10683)."""

    @classmethod
    def read_config(cls, keys: ConfigKeys, max_len: int | None) -> EncoderConfig:
        keys.pass_over(*UNUSED)
        config = read_encoder(
            under_names(keys, SIZES),
            names=NAMES,
            norm=RMS,
            eps_key="layer_norm_epsilon",
            eps=1e-6,
            activation_key="feed_forward_proj",
            activations=ACTIVATIONS,
            activation="relu",
            has_bias=False,
            mlp_bias=False,
        )
        if keys.get("feed_forward_proj", "relu").startswith("gated-"):
            gates = ("layer.1.DenseReluDense.wi_0", "layer.1.DenseReluDense.wi_1")
            config = dataclasses.replace(config, names=NAMES._replace(ups=gates))
        buckets = keys.size("relative_attention_num_buckets", 32, low=8)
        distances = DistancePart(
            "encoder.block.0.layer.0.SelfAttention.relative_attention_bias",
            buckets,
            keys.size("relative_attention_max_distance", 128, low=buckets),
        )
        config = config.with_attention(scale=1.0)
        left_out = ("decoder.", "lm_head.", "encoder.embed_tokens.")
        return dataclasses.replace(config, distances=distances, left_out=left_out)
