"""EmbeddingGemma (arXiv 2509.20354): Gemma 3 with attention in both directions, and so an encoder."""

from __future__ import annotations

import dataclasses

from octavo.models.config_keys import ConfigKeys
from octavo.models.encoder import Encoder, EncoderConfig, read_encoder
from octavo.models.gemma3 import rope_keys
from octavo.models.model_config import ACTIVATIONS, SLIDING, read_layer_types
from octavo.models.parts import HeadNorm, Names, NormPart

NAMES = Names(
    embedding="embed_tokens",
    layers="layers",
    norm="norm",
    after_attention="post_attention_layernorm",
    before_mlp="pre_feedforward_layernorm",
    after_mlp="post_feedforward_layernorm",
)


class EmbeddingGemma(Encoder):
    """An encoder: EmbeddingGemma (arXiv 2509.20354), if use_bidirectional_attention is true; else Gemma 3."""

    @classmethod
    def read_config(cls, keys: ConfigKeys, max_len: int | None) -> EncoderConfig:
        keys.pass_over(
            "hidden_act", "use_bidirectional_attention"
        )  # the older key of hidden_activation; and what makes it an encoder
        every = keys.size("sliding_window_pattern", keys.get("_sliding_window_pattern", 6))
        types = read_layer_types(keys, lambda i: (i + 1) % every)
        reach = keys.size("sliding_window", 4096) // 2
        config = read_encoder(
            keys,
            names=NAMES,
            norm=NormPart(offset=1.0),
            eps_key="rms_norm_eps",
            eps=1e-6,
            activation_key="hidden_activation",
            activations=ACTIVATIONS,
            activation="gelu_pytorch_tanh",
            has_bias=keys.flag("attention_bias"),
            mlp_bias=False,
            positions=131_072,
            windows=[reach if kind == SLIDING else 0 for kind in types],
            rope_of=[int(kind == SLIDING) for kind in types],
        )
        full, local = rope_keys(keys)
        scale = keys.number("query_pre_attn_scalar", 256) ** -0.5
        config = config.with_attention(scale=scale, head_norm=HeadNorm(offset=1.0))
        return dataclasses.replace(
            config,
            ropes=(config.rope({"rope_theta": 1_000_000.0, **full}, max_len), config.rope(local, max_len)),
            root="model.",
            embedding_scale=config.hidden_size**0.5,
        )
