"""Arcee AFM and Nemotron (arXiv 2402.16819), dense: feed-forward layers without gates, with squared ReLUs.

Nemotron also has LayerNorms that multiply by 1 + weight, and rotates half of each head.
"""

from __future__ import annotations

from octavo.models.config_keys import ConfigKeys
from octavo.models.decoder import PLAIN_ACTIVATIONS, Decoder, read_decoder
from octavo.models.parts import DecoderConfig, Names, NormPart

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
