"""Gemma (arXiv 2403.08295) and Gemma 2 (arXiv 2408.00118).

Norms multiply by 1 + weight, embeddings are scaled by the square root of their width, and the gates use GELU. Gemma 2
adds norms after attention and MLP, soft caps for attention scores and logits, and a sliding window in every other
layer.

Shapes: T tokens of the step, R rows whose logits are needed, D model, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from octavo import ops
from octavo.models.config import FULL, SLIDING, read_layer_types
from octavo.models.config_keys import ConfigKeys
from octavo.models.llama import LlamaConfig, LlamaForCausalLM, read_llama
from octavo.models.loader import WeightLoader
from octavo.models.post_norm import NormNames, PostNormLayer
from octavo.ops.attention import HeadLayout, LayerCache, PagedRows


@dataclass(frozen=True, kw_only=True)
class Gemma2Config(LlamaConfig):
    scale: float
    """Scale of attention scores."""
    softcap: float
    """Soft cap of attention scores, 0 for none."""
    final_softcap: float
    """Soft cap of logits, 0 for none."""


def norm_offset(keys: ConfigKeys) -> float:
    """The offset to add to stored norm weights: 1, unless the checkpoint format (GGUF) already includes it."""
    return 0.0 if keys.flag("norms_include_one") else 1.0


class GemmaForCausalLM(LlamaForCausalLM):
    """The first Gemma: Llama's layers with Gemma's norms and embeddings."""

    @classmethod
    def read_config(cls, keys: ConfigKeys, max_len: int | None) -> LlamaConfig:
        if keys.get("hidden_activation") is None:  # the older hidden_act says gelu but means its tanh form
            keys.choice("hidden_act", {"gelu": None, "gelu_pytorch_tanh": None}, "gelu_pytorch_tanh")
        key = "hidden_activation"
        config = read_llama(keys, max_len, tied=True, head_dim=256, activation_key=key, activation="gelu_pytorch_tanh")
        return dataclasses.replace(config, norm_offset=norm_offset(keys))

    def __init__(self, config: LlamaConfig, weights: WeightLoader) -> None:
        super().__init__(config, weights)
        self.embedding_scale = weights.rounded(config.hidden_size**0.5)

    def forward(
        self, token_ids_T: Tensor, positions_T: Tensor, caches: Sequence[LayerCache], rows: PagedRows
    ) -> Tensor:
        x_TD = self.embed(token_ids_T, rows)
        angles = self.rotary(positions_T, rows.rope_shifts_AT)
        for layer, cache, own_rows in zip(self.layers, caches, rows.of_layers(len(self.layers)), strict=True):
            x_TD = layer(x_TD, angles, cache, own_rows)
        return x_TD

    def embed(self, token_ids_T: Tensor, rows: PagedRows) -> Tensor:
        x_TD = ops.scaled(self.embedding(token_ids_T), self.embedding_scale)
        return x_TD if rows.images is None else rows.images.put(x_TD)


class Gemma2Layer(PostNormLayer):
    names = NormNames(
        "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"
    )

    def head_layout(self, config: LlamaConfig, weights: WeightLoader, prefix: str, index: int) -> HeadLayout:
        assert isinstance(config, Gemma2Config)
        plain = super().head_layout(config, weights, prefix, index)
        return plain._replace(scale=config.scale, softcap=config.softcap)


def read_gemma2(keys: ConfigKeys, config: LlamaConfig, softcap: float, final_softcap: float) -> Gemma2Config:
    """Add Gemma 2's keys to Llama's configuration; the arguments are default soft caps, 0 for none."""
    fields = {field.name: getattr(config, field.name) for field in dataclasses.fields(LlamaConfig)}
    return Gemma2Config(
        **{**fields, "norm_offset": norm_offset(keys)},
        scale=keys.number("query_pre_attn_scalar", 256.0) ** -0.5,
        softcap=_softcap(keys, "attn_logit_softcapping", softcap),
        final_softcap=_softcap(keys, "final_logit_softcapping", final_softcap),
    )


def _softcap(keys: ConfigKeys, key: str, default: float) -> float:
    """Read a soft cap; null means none, and an absent key the default."""
    if not keys.has(key):
        return default
    return 0.0 if keys.get(key) is None else keys.number(key)


class Gemma2ForCausalLM(GemmaForCausalLM):
    layer_class = Gemma2Layer
    config: Gemma2Config

    @classmethod
    def read_config(cls, keys: ConfigKeys, max_len: int | None) -> Gemma2Config:
        keys.get("hidden_act")  # the older key; hidden_activation takes precedence
        types = [FULL if i % 2 else SLIDING for i in range(keys.size("num_hidden_layers"))]
        config = read_llama(
            keys,
            max_len,
            tied=True,
            head_dim=256,
            activation_key="hidden_activation",
            activation="gelu_pytorch_tanh",
            windows=(read_layer_types(keys, types), keys.size("sliding_window", 4096)),
        )
        return read_gemma2(keys, config, softcap=50.0, final_softcap=30.0)

    def logits(self, x_RD: Tensor) -> Tensor:
        logits_RV = super().logits(x_RD)
        cap = self.config.final_softcap
        return logits_RV.div_(cap).tanh_().mul_(cap) if cap else logits_RV
