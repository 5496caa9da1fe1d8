"""The text part of Gemma 3 (arXiv 2503.19786): Gemma 2 with normalised query and key heads instead of soft caps.

Five of six layers have a sliding window and their own rotary frequencies; the sixth has full attention.

Shapes: T tokens of the step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from octavo.layers.rotary import DefaultRope, Rotary
from octavo.models.config import FULL, SLIDING, read_layer_types
from octavo.models.config_keys import ConfigKeys, wrong
from octavo.models.gemma2 import Gemma2Config, Gemma2ForCausalLM, Gemma2Layer, read_gemma2
from octavo.models.llama import LlamaConfig, read_llama
from octavo.models.loader import WeightLoader
from octavo.models.rope import RopeContext, read_rope, rope_values
from octavo.ops.attention import HeadLayout, LayerCache, PagedRows


@dataclass(frozen=True, kw_only=True)
class Gemma3Config(Gemma2Config):
    local_rope: DefaultRope
    """Rotary embedding of the sliding-window layers."""
    is_local: tuple[bool, ...]

    @property
    def rotary_embeddings(self) -> tuple[DefaultRope, ...]:
        return self.rope, self.local_rope


class Gemma3Layer(Gemma2Layer):
    def head_layout(self, config: LlamaConfig, weights: WeightLoader, prefix: str, index: int) -> HeadLayout:
        names = (f"{prefix}.{part}_norm.weight" for part in "qk")
        q_norm, k_norm = (weights.norm_weight(name, config.head_dim, config.norm_offset) for name in names)
        plain = super().head_layout(config, weights, prefix, index)
        return plain._replace(q_norm_H=q_norm, k_norm_H=k_norm, norm_eps=config.norm_eps)


def rope_keys(keys: ConfigKeys) -> tuple[dict[str, Any], dict[str, Any]]:
    """Rotary keys of the full-attention layers, and those of the sliding-window layers."""
    both = keys.get("rope_parameters")
    if isinstance(both, dict) and (FULL in both or SLIDING in both):
        for kind, part in both.items():
            if kind not in (FULL, SLIDING) or not isinstance(part, dict):
                raise wrong(f"rope_parameters.{kind}", part, f"an object, under {FULL} or {SLIDING}")
        return both.get(FULL, {}), both.get(SLIDING, {})
    return rope_values(keys), {"rope_theta": keys.number("rope_local_base_freq", 10_000.0)}


class Gemma3ForCausalLM(Gemma2ForCausalLM):
    layer_class = Gemma3Layer
    config: Gemma3Config

    @classmethod
    def read_config(cls, keys: ConfigKeys, max_len: int | None) -> Gemma3Config:
        keys.get("hidden_act")  # the older key; hidden_activation takes precedence
        full, local = rope_keys(keys)
        every = keys.size("sliding_window_pattern", keys.get("_sliding_window_pattern", 6))
        kinds = [SLIDING if (i + 1) % every else FULL for i in range(keys.size("num_hidden_layers"))]
        types = read_layer_types(keys, kinds)
        config = read_llama(
            keys,
            max_len,
            tied=True,
            head_dim=256,
            activation_key="hidden_activation",
            activation="gelu_pytorch_tanh",
            windows=(types, keys.size("sliding_window", 4096)),
            rope={"rope_theta": 1_000_000.0, **full},
        )
        inner = read_gemma2(keys, config, softcap=0.0, final_softcap=0.0)
        most = config.max_position_embeddings
        return Gemma3Config(
            **{field.name: getattr(inner, field.name) for field in dataclasses.fields(inner)},
            local_rope=read_rope(local, RopeContext(config.head_dim, max_len or most, most)),
            is_local=tuple(kind == SLIDING for kind in types),
        )

    def __init__(self, config: Gemma3Config, weights: WeightLoader) -> None:
        super().__init__(config, weights)
        self.local_rotary = Rotary(config.local_rope, config.head_dim, weights.form.device)

    def forward(
        self, token_ids_T: Tensor, positions_T: Tensor, caches: Sequence[LayerCache], rows: PagedRows
    ) -> Tensor:
        x_TD = self.embed(token_ids_T, rows)
        angles, local_angles = (rotary(positions_T, rows.rope_shifts_AT) for rotary in (self.rotary, self.local_rotary))
        by_layer = rows.of_layers(len(self.layers))
        for layer, cache, is_local, own_rows in zip(self.layers, caches, self.config.is_local, by_layer, strict=True):
            x_TD = layer(x_TD, local_angles if is_local else angles, cache, own_rows)
        return x_TD
