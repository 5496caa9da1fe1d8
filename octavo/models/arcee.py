"""Arcee AFM, Nemotron (arXiv 2402.16819), Jais 2 and nanochat, dense: squared ReLUs, and no gates.

Nemotron and Jais 2 have LayerNorms; those of Nemotron multiply by 1 + weight, and half of each head is rotated. Norms
of nanochat (A. Karpathy) have no weights; it rotates the other way round, and normalises queries and keys afterwards.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from octavo.layers.linear import Linear
from octavo.models.config_keys import ConfigKeys
from octavo.models.decoder import PLAIN_ACTIVATIONS, Decoder, read_decoder
from octavo.models.decoder_layer import DecoderLayer
from octavo.models.loader import WeightLoader
from octavo.models.parts import DecoderConfig, HeadNorm, Names, NormPart

UNGATED = Names(ups=("mlp.up_proj",))


class ArceeForCausalLM(Decoder):
    @classmethod
    def read_config(cls, keys: ConfigKeys, max_len: int | None) -> DecoderConfig:
        return read_decoder(keys, max_len, eps=1e-5, activation="relu2", activations=PLAIN_ACTIVATIONS, names=UNGATED)


class NemotronForCausalLM(Decoder):
    @classmethod
    def read_config(cls, keys: ConfigKeys, max_len: int | None) -> DecoderConfig:
        return read_decoder(
            keys,
            max_len,
            eps=1e-5,
            eps_key="norm_eps",
            activation="relu2",
            activations=PLAIN_ACTIVATIONS,
            rotary=0.5,
            names=UNGATED,
            norm=NormPart(is_layer_norm=True, offset=0.0 if keys.flag("norms_include_one") else 1.0),
        )


class Jais2ForCausalLM(Decoder):
    @classmethod
    def read_config(cls, keys: ConfigKeys, max_len: int | None) -> DecoderConfig:
        return read_decoder(
            keys,
            max_len,
            eps=1e-5,
            eps_key="layer_norm_eps",
            activation="relu2",
            activations=PLAIN_ACTIVATIONS,
            has_bias=keys.flag("attention_bias", True),
            mlp_bias=keys.flag("mlp_bias", True),
            names=UNGATED,
            norm=NormPart(is_layer_norm=True),
        )


class NanoChatLayer(DecoderLayer):
    def qkv(self, config: DecoderConfig, weights: WeightLoader, prefix: str) -> Linear:
        H, counts = self.part.head_dim, (self.part.num_heads, self.part.num_kv_heads)
        halves = (np.arange(count * H).reshape(count, 2, H // 2)[:, ::-1].ravel() for count in counts)
        names = [f"{prefix}.{name}" for name in config.names.queries]
        return weights.qkv(names, self.heads, config.hidden_size, self.part.has_bias, orders=(*halves, None))


class NanoChatForCausalLM(Decoder):
    layer_class = NanoChatLayer

    @classmethod
    def read_config(cls, keys: ConfigKeys, max_len: int | None) -> DecoderConfig:
        has_bias = keys.flag("attention_bias")
        config = read_decoder(
            keys,
            max_len,
            activation="relu2",
            activations=PLAIN_ACTIVATIONS,
            has_bias=has_bias,
            mlp_bias=False,
            names=Names(ups=("mlp.fc1",), down="mlp.fc2"),
            norm=NormPart(has_weight=False),
        )
        cap = "final_logit_softcapping"
        softcap = keys.number(cap) if keys.get(cap) is not None else 0.0 if keys.has(cap) else 15.0
        norm = HeadNorm(has_weight=False, is_after_rope=True)
        config = dataclasses.replace(config, has_embedding_norm=True, final_softcap=softcap)
        return config.with_attention(head_norm=norm)
