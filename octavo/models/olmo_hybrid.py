"""OLMo Hybrid (Ai2, 2026): three of four layers have a gated delta rule, the others are those of OLMo 3.

Betas may be up to two, so that the state's transition has negative eigenvalues; usually no position is rotated.
"""

from __future__ import annotations

import dataclasses

from octavo.layers.recurrent import GatedDelta
from octavo.models.config_keys import ONE_ACTIVATION, ConfigKeys, wrong
from octavo.models.decoder import NO_WINDOWS, Decoder, read_decoder
from octavo.models.hybrid import LINEAR, HybridLayer, Recurrence
from octavo.models.linear_parts import MatrixRows
from octavo.models.loader import WeightLoader
from octavo.models.model_config import FULL
from octavo.models.olmo import AFTER, JOINT
from octavo.models.parts import DecoderConfig, Names
from octavo.models.qwen3_next import DeltaSizes, delta_heads
from octavo.models.rope_keys import rope_values
from octavo.quant.stored.shard import Section

UNUSED = ("linear_a_log_max", "linear_a_log_min", "linear_dt_init_floor", "linear_dt_max", "linear_dt_min")
"""Keys of training."""
DELTA_NORM_EPS = 1e-5
"""Of the norms of the heads' outputs, independent of ``rms_norm_eps``."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class OlmoHybridConfig(DecoderConfig):
    delta: DeltaSizes
    beta_scale: float


class OlmoHybridLayer(HybridLayer):
    """A norm has the first of its names that a checkpoint has: those of transformers differ from the published ones."""

    def __init__(self, config: DecoderConfig, weights: WeightLoader, prefix: str, index: int) -> None:
        second = _first(weights, prefix, "post_attention_layernorm", "feedforward_layer_norm")
        names = AFTER._replace(after_attention=second)
        if config.layers[index].is_recurrent:
            first = _first(weights, prefix, "attention_layer_norm", "input_layernorm")
            names = Names(before_attention=first, before_mlp=second)
        super().__init__(dataclasses.replace(config, names=names), weights, prefix, index)

    def load_recurrence(self, config: DecoderConfig, weights: WeightLoader, prefix: str) -> Recurrence:
        assert isinstance(config, OlmoHybridConfig)
        D, sizes, name = config.hidden_size, config.delta, f"{prefix}.linear_attn"
        heads = delta_heads(sizes, weights, name, DELTA_NORM_EPS, "o_norm")._replace(beta_scale=config.beta_scale)
        queries, keys, values = sizes.channels
        own = Section(sizes.num_heads, sizes.num_key_heads)
        parts = {"q": queries, "k": keys, "v": values, "g": values, "b": own, "a": own}
        stored = [MatrixRows(f"{name}.{part}_proj", [section]) for part, section in parts.items()]
        conv_WC = weights.conv([f"{name}.{part}_conv1d" for part in "qkv"], sizes.channels, sizes.width)
        self.o_proj = weights.row(f"{name}.o_proj", D, sizes.values)
        return GatedDelta(self.input_norm, weights.fused(stored, D), conv_WC, heads)


def _first(weights: WeightLoader, prefix: str, *names: str) -> str:
    return next((name for name in names if weights.tensors.has(f"{prefix}.{name}.weight")), names[0])


class OlmoHybridForCausalLM(Decoder):
    layer_class = OlmoHybridLayer

    @classmethod
    def read_config(cls, keys: ConfigKeys, max_len: int | None) -> DecoderConfig:
        keys.must_be(ONE_ACTIVATION)
        num_layers = keys.size("num_hidden_layers")
        config = read_decoder(keys, max_len, windows=NO_WINDOWS, mlp_bias=False)
        kinds = keys.choices("layer_types", (LINEAR, FULL), num_layers)
        last = num_layers - 1 if num_layers < 4 else None
        kinds = kinds or tuple(FULL if i % 4 == 3 or i == last else LINEAR for i in range(num_layers))
        count = keys.size("linear_num_key_heads", config.num_heads)
        width = keys.size("linear_key_head_dim", int(0.75 * config.hidden_size / count))
        delta = DeltaSizes(
            count,
            keys.size("linear_num_value_heads", config.num_heads),
            width,
            keys.size("linear_value_head_dim", 2 * width),
            keys.size("linear_conv_kernel_dim", 4, low=2),
        )
        if delta.num_heads % count:
            raise wrong("linear_num_value_heads", delta.num_heads, f"a multiple of {count} key heads")
        keys.pass_over(*UNUSED)
        rotates = "rope_theta" in rope_values(keys) or not keys.has("rope_parameters")  # null: no positions
        config = config.with_attention(head_norm=JOINT, rope=0 if rotates else None)
        config = config.with_caches([delta.cache if kind == LINEAR else None for kind in kinds])
        beta_scale = 2.0 if keys.flag("linear_allow_neg_eigval", True) else 1.0
        return config.extended(OlmoHybridConfig, delta=delta, beta_scale=beta_scale)
