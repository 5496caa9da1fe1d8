"""OLMo Hybrid (Ai2, 2026): three of four layers have a gated delta rule, the others are those of OLMo 3.

Betas may be up to two, so that the state's transition has negative eigenvalues; usually no position is rotated.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import Tensor

from octavo.layers.gated_delta import GatedDelta
from octavo.layers.mlp import GatedMLP
from octavo.layers.output_mlp import output_mlp
from octavo.models.config import FULL
from octavo.models.config_keys import ConfigKeys, wrong
from octavo.models.hybrid import LINEAR, HybridConfig, HybridForCausalLM, of_llama
from octavo.models.layer_cache import LayerCacheSpec
from octavo.models.linear_parts import MatrixRows
from octavo.models.llama import read_llama
from octavo.models.loader import WeightLoader
from octavo.models.olmo2 import Olmo2Layer
from octavo.models.post_norm import NormNames
from octavo.models.qwen3_next import DeltaSizes, delta_heads
from octavo.models.rope import rope_values
from octavo.ops.attention import LayerCache, PagedRows
from octavo.quant.stored.shard import Section

UNUSED = ("linear_a_log_max", "linear_a_log_min", "linear_dt_init_floor", "linear_dt_max", "linear_dt_min")
"""Keys of training."""
DELTA_NORM_EPS = 1e-5
"""Of the norms of the heads' outputs, independent of ``rms_norm_eps``."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class OlmoHybridConfig(HybridConfig):
    delta: DeltaSizes
    beta_scale: float


class OlmoHybridLayer(Olmo2Layer):
    """A norm has the first of its names that a checkpoint has: those of transformers differ from the published ones."""

    def __init__(self, config: OlmoHybridConfig, weights: WeightLoader, prefix: str, index: int) -> None:
        self.delta: GatedDelta | None = None
        second = _first(weights, prefix, "post_attention_layernorm", "feedforward_layer_norm")
        if config.kinds[index] == FULL:
            self.names = NormNames(None, second, None, "post_feedforward_layernorm")
            super().__init__(config, weights, prefix, index)
            return
        D, sizes, name = config.hidden_size, config.delta, f"{prefix}.linear_attn"
        first = _first(weights, prefix, "attention_layer_norm", "input_layernorm")
        norm = weights.norm(f"{prefix}.{first}", D, config.norm_eps)
        heads = delta_heads(sizes, weights, name, DELTA_NORM_EPS, "o_norm")._replace(beta_scale=config.beta_scale)
        queries, keys, values = sizes.channels
        own = Section(sizes.num_heads, sizes.num_key_heads)
        parts = {"q": queries, "k": keys, "v": values, "g": values, "b": own, "a": own}
        stored = [MatrixRows(f"{name}.{part}_proj", [section]) for part, section in parts.items()]
        conv_WC = weights.convs([f"{name}.{part}_conv1d" for part in "qkv"], sizes.channels, sizes.width)
        self.delta = GatedDelta(norm, weights.fused(stored, D), conv_WC, heads)
        self.o_proj = weights.row(f"{name}.o_proj", D, sizes.values)
        self.mlp = GatedMLP(
            weights.norm(f"{prefix}.{second}", D, config.norm_eps),
            self.gate_up(config, weights, f"{prefix}.mlp"),
            weights.row(f"{prefix}.mlp.down_proj", D, config.ffn_size),
            config.activation,
        )

    def __call__(self, x_TD: Tensor, angles: Any, cache: LayerCache, rows: PagedRows) -> Tensor:
        if self.delta is None:
            return super().__call__(x_TD, angles, cache, rows)
        mixed, x_TD = rows.pick(self.delta(x_TD, cache, rows), x_TD)
        return output_mlp(self.o_proj, self.mlp, mixed, x_TD)


def _first(weights: WeightLoader, prefix: str, *names: str) -> str:
    return next((name for name in names if weights.tensors.has(f"{prefix}.{name}.weight")), names[0])


class OlmoHybridForCausalLM(HybridForCausalLM):
    layer_class = OlmoHybridLayer

    @classmethod
    def read_config(cls, keys: ConfigKeys, max_len: int | None) -> OlmoHybridConfig:
        num_layers = keys.size("num_hidden_layers")
        plain = read_llama(keys, max_len, windows=((FULL,) * num_layers, None))
        kinds = keys.choices("layer_types", (LINEAR, FULL), num_layers)
        kinds = kinds or tuple(FULL if i % 4 == 3 else LINEAR for i in range(num_layers))
        count = keys.size("linear_num_key_heads", plain.num_heads)
        width = keys.size("linear_key_head_dim", int(0.75 * plain.hidden_size / count))
        delta = DeltaSizes(
            count,
            keys.size("linear_num_value_heads", plain.num_heads),
            width,
            keys.size("linear_value_head_dim", 2 * width),
            keys.size("linear_conv_kernel_dim", 4, low=2),
        )
        if delta.num_heads % count:
            raise wrong("linear_num_value_heads", delta.num_heads, f"a multiple of {count} key heads")
        for key in UNUSED:
            keys.get(key)
        of_attention = LayerCacheSpec(plain.num_kv_heads, plain.head_dim)
        return OlmoHybridConfig(
            **of_llama(plain),
            kinds=kinds,
            caches=tuple(delta.cache if kind == LINEAR else of_attention for kind in kinds),
            has_rope="rope_theta" in rope_values(keys),
            delta=delta,
            beta_scale=2.0 if keys.flag("linear_allow_neg_eigval", True) else 1.0,
        )
