"""Falcon-H1 (arXiv 2507.22448): attention and Mamba-2 side by side in each layer, and factors of what they compute.

Shapes: T tokens of the step, D model, F ffn.
"""

from __future__ import annotations

import dataclasses

from torch import Tensor

from octavo import ops
from octavo.layers.attention_inputs import StepAngles
from octavo.layers.linear import Linear, RowParallelLinear
from octavo.layers.mlp import MLP
from octavo.models.config_keys import ConfigKeys, wrong
from octavo.models.decoder import NO_WINDOWS, Decoder, read_decoder
from octavo.models.decoder_layer import DecoderLayer, FeedForward
from octavo.models.hybrid import MambaSizes, load_mamba2, read_bamba_sizes
from octavo.models.layer_cache import LayerCacheSpec
from octavo.models.loader import WeightLoader
from octavo.models.parts import DecoderConfig, Names
from octavo.ops.attention.attention import LayerCache, PagedRows
from octavo.ops.linear.linear import Activation

SILU: dict[str, Activation] = {"silu": "silu", "swish": "silu"}
NAMES = Names(
    norm="model.final_layernorm",
    before_mlp="pre_ff_layernorm",
    ups=("feed_forward.gate_proj", "feed_forward.up_proj"),
    down="feed_forward.down_proj",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FalconH1Config(DecoderConfig):
    mamba: MambaSizes
    mamba_output_bias: bool
    mixer_scales: tuple[float, float]
    """Factors of the outputs of Mamba-2 and of attention."""
    mlp_scales: tuple[float, float]
    """Factors of the gates and of the result of feed-forward layers."""


class ScaledMLP:
    """``x + out_scale * down(silu(gate_scale * gate(norm(x))) * up(norm(x)))``"""

    def __init__(self, plain: MLP, scales: tuple[float, float]) -> None:
        self.plain = plain
        self.gate_scale, self.out_scale = scales

    def __call__(self, x_TD: Tensor) -> Tensor:
        gate_TF, up_TF = self.plain.up.of_normed(x_TD, self.plain.before).chunk(2, dim=-1)
        gate_up_T2F = ops.concat(ops.scaled(gate_TF, self.gate_scale), up_TF)
        return _add(x_TD, self.plain.down, ops.silu_and_mul(gate_up_T2F), self.out_scale)


def _add(x_TD: Tensor, output: Linear | RowParallelLinear, h: Tensor, scale: float) -> Tensor:
    """``x + scale * output(h)``; ``x`` may be overwritten."""
    if scale == 1.0:
        return output(h, residual=x_TD)
    return ops.scaled(output(h), scale, x_TD)


class FalconH1Layer(DecoderLayer):
    """``x + attention(h) + mamba(h)`` with ``h = norm(x)``, then the feed-forward layer."""

    def load_mixer(self, config: DecoderConfig, weights: WeightLoader, prefix: str, index: int) -> None:
        super().load_mixer(config, weights, prefix, index)
        assert isinstance(config, FalconH1Config)
        D, name, self.scales = config.hidden_size, f"{prefix}.mamba", config.mixer_scales
        self.mamba = load_mamba2(weights, name, config.mamba, D, self.input_norm, config.norm_eps)
        self.mamba_output = weights.row(f"{name}.out_proj", D, config.mamba.inner, config.mamba_output_bias)

    def feed_forward(self, config: DecoderConfig, weights: WeightLoader, prefix: str, index: int) -> FeedForward:
        plain = super().feed_forward(config, weights, prefix, index)
        assert isinstance(config, FalconH1Config)
        assert isinstance(plain, MLP)
        return plain if config.mlp_scales == (1.0, 1.0) else ScaledMLP(plain, config.mlp_scales)

    def __call__(self, x_TD: Tensor, step: StepAngles, cache: LayerCache, rows: PagedRows) -> Tensor:
        mixed = self.mamba(x_TD, cache, rows)
        attended = self.mix(x_TD, step, cache, rows)
        (mixed, _), (attended, x_TD) = rows.pick(mixed, x_TD), rows.pick(attended, x_TD)
        x_TD = _add(x_TD, self.mamba_output, mixed, self.scales[0])
        return self.mlp(_add(x_TD, self.o_proj, attended, self.scales[1]))


class FalconH1ForCausalLM(Decoder):
    layer_class = FalconH1Layer

    @classmethod
    def read_config(cls, keys: ConfigKeys, max_len: int | None) -> DecoderConfig:
        config = read_decoder(keys, max_len, eps=1e-5, activations=SILU, windows=NO_WINDOWS, names=NAMES)
        keys.pass_over("num_logits_to_keep", "layers_block_type", "layer_types")
        inner = None if keys.get("mamba_d_ssm") is None else keys.size("mamba_d_ssm")
        scale_in = keys.number("ssm_in_multiplier", 1.0)
        scales = tuple(scale * scale_in for scale in _factors(keys, "ssm_multipliers", 5))
        of_gates, of_result = _factors(keys, "mlp_multipliers", 2)
        mamba = read_bamba_sizes(keys, config.hidden_size, inner)._replace(
            has_norm=keys.flag("mamba_rms_norm"),
            is_gated_first=not keys.flag("mamba_norm_before_gate", True),
            scales=scales if set(scales) != {1.0} else (),
        )
        into = keys.number("attention_in_multiplier", 1.0)
        for key, has_bias, factor in (
            ("mamba_proj_bias", mamba.has_bias, scale_in),
            ("attention_bias", config.layers[0].attention.has_bias, into),
        ):
            if has_bias and factor != 1.0:
                raise wrong(key, True, "false, where the inputs have a factor")
        config = config.with_attention(scale=config.head_dim**-0.5 * into * into * keys.number("key_multiplier", 1.0))
        cache = LayerCacheSpec(config.num_kv_heads, config.head_dim, state=mamba.cache.state)
        return config.with_caches([cache] * config.num_layers).extended(
            FalconH1Config,
            mamba=mamba,
            mamba_output_bias=keys.flag("projectors_bias"),
            mixer_scales=(keys.number("ssm_out_multiplier", 1.0), into * keys.number("attention_out_multiplier", 1.0)),
            mlp_scales=(of_gates, of_result),
            embedding_scale=keys.number("embedding_multiplier", 1.0),
            logit_scale=keys.number("lm_head_multiplier", 1.0),
        )


def _factors(keys: ConfigKeys, key: str, count: int) -> tuple[float, ...]:
    return (1.0,) * count if keys.get(key) is None else keys.numbers(key, count)
