"""Gemma (arXiv 2403.08295), Gemma 2 (arXiv 2408.00118) and VaultGemma (arXiv 2510.15001).

Norms multiply by 1 + weight, embeddings are scaled by the square root of their width, and the gates use GELU. Gemma 2
adds norms after attention and MLP, soft caps for attention scores and logits, and a sliding window in every other
layer.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from octavo.models.config_keys import ConfigKeys
from octavo.models.decoder import Decoder, read_decoder
from octavo.models.loader import WeightLoader
from octavo.models.model_config import read_layer_types
from octavo.models.parts import DecoderConfig, Names, NormPart

NAMES = Names(
    after_attention="post_attention_layernorm",
    before_mlp="pre_feedforward_layernorm",
    after_mlp="post_feedforward_layernorm",
)


def norm_offset(keys: ConfigKeys) -> float:
    """The offset to add to stored norm weights: 1, unless the checkpoint format (GGUF) already includes it."""
    return 0.0 if keys.flag("norms_include_one") else 1.0


def read_gemma(keys: ConfigKeys, max_len: int | None, **more: Any) -> DecoderConfig:
    """Read what all of them have alike; ``more`` goes to ``read_decoder``."""
    config = read_decoder(
        keys,
        max_len,
        tied=True,
        head_dim=256,
        activation_key="hidden_activation",
        activation="gelu_pytorch_tanh",
        norm=NormPart(offset=norm_offset(keys)),
        **more,
    )
    return dataclasses.replace(config, embedding_scale=config.hidden_size**0.5)


def with_softcaps(keys: ConfigKeys, config: DecoderConfig, softcap: float, final_softcap: float) -> DecoderConfig:
    """With the scale of attention scores, and soft caps of them and of logits, by default these, 0 for none."""
    scale = keys.number("query_pre_attn_scalar", 256.0) ** -0.5
    config = config.with_attention(scale=scale, softcap=_softcap(keys, "attn_logit_softcapping", softcap))
    return dataclasses.replace(config, final_softcap=_softcap(keys, "final_logit_softcapping", final_softcap))


def _softcap(keys: ConfigKeys, key: str, default: float) -> float:
    """Read a soft cap; null means none, and an absent key the default."""
    if not keys.has(key):
        return default
    return 0.0 if keys.get(key) is None else keys.number(key)


class GemmaForCausalLM(Decoder):
    """The first Gemma: Llama's layers with Gemma's norms and embeddings."""

    @classmethod
    def read_config(cls, keys: ConfigKeys, max_len: int | None) -> DecoderConfig:
        if keys.get("hidden_activation") is None:  # the older hidden_act says gelu but means its tanh form
            keys.choice("hidden_act", {"gelu": None, "gelu_pytorch_tanh": None}, "gelu_pytorch_tanh")
        return read_gemma(keys, max_len)

    def __init__(self, config: DecoderConfig, weights: WeightLoader) -> None:
        super().__init__(config, weights)
        self.embedding_scale = weights.rounded(config.embedding_scale)


class Gemma2ForCausalLM(GemmaForCausalLM):
    @classmethod
    def read_config(cls, keys: ConfigKeys, max_len: int | None) -> DecoderConfig:
        keys.get("hidden_act")  # the older key; hidden_activation takes precedence
        windows = (read_layer_types(keys, lambda i: i % 2 == 0), keys.size("sliding_window", 4096))
        config = read_gemma(keys, max_len, windows=windows, names=NAMES)
        return with_softcaps(keys, config, softcap=50.0, final_softcap=30.0)


class VaultGemmaForCausalLM(Gemma2ForCausalLM):
    """Gemma 2 without norms of what is added."""

    @classmethod
    def read_config(cls, keys: ConfigKeys, max_len: int | None) -> DecoderConfig:
        names = NAMES._replace(after_attention=None, after_mlp=None)
        return dataclasses.replace(super().read_config(keys, max_len), names=names)
