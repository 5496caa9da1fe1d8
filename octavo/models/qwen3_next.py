"""Qwen3-Next (Qwen team, 2025): three of four layers have a gated delta rule, the fourth attention with an output gate.

Norms multiply by 1 + weight, save that of the delta rule; a quarter of each head is rotated. All layers have experts,
one of which all tokens use.

Shapes: T tokens of the step, D model, N heads, H head dim, C channels of a convolution, G key heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from octavo.errors import CheckpointError
from octavo.layers.linear import Linear, RowParallelLinear
from octavo.layers.recurrent import GatedDelta
from octavo.models.config_keys import ONE_ACTIVATION, ConfigKeys, wrong
from octavo.models.decoder import NO_WINDOWS, Decoder, read_decoder
from octavo.models.gemma2 import norm_offset
from octavo.models.hybrid import LINEAR, HybridLayer, Recurrence
from octavo.models.layer_cache import LayerCacheSpec, conv_state, recurrent_state, state_layer
from octavo.models.linear_parts import MatrixRows
from octavo.models.loader import WeightLoader
from octavo.models.model_config import FULL
from octavo.models.parts import DecoderConfig, GatePart, HeadNorm, NormPart
from octavo.models.qwen_moe import with_qwen_experts
from octavo.models.rope_keys import rope_values
from octavo.ops.recurrent.gated_delta import DeltaHeads
from octavo.ops.recurrent.gated_norm import Gate
from octavo.quant.stored.shard import Section

OF_IMAGES = ("mrope_section", "mrope_interleaved")
"""Rotary keys for images: the three positions of a text token are the same."""


class DeltaSizes(NamedTuple):
    """Sizes of the layers with the gated delta rule."""

    num_key_heads: int
    num_heads: int
    key_dim: int
    value_dim: int
    width: int
    """Of the convolution."""
    is_tiled: bool = False
    """See ``DeltaHeads``: the order of the output projection's inputs."""
    gate: Gate = "silu"

    @property
    def keys(self) -> int:
        """Numbers of all keys of a token."""
        return self.num_key_heads * self.key_dim

    @property
    def values(self) -> int:
        """Numbers of all values of a token."""
        return self.num_heads * self.value_dim

    @property
    def channels(self) -> list[Section]:
        """Those of the convolution, which ranks divide by key heads: queries, keys and values."""
        return [Section(size, self.num_key_heads) for size in (self.keys, self.keys, self.values)]

    @property
    def cache(self) -> LayerCacheSpec:
        channels = conv_state(self.width, 2 * self.keys + self.values, self.num_key_heads)
        state = recurrent_state(self.num_heads, self.key_dim, self.value_dim, self.num_key_heads)
        return state_layer(channels, state)


@dataclass(frozen=True, kw_only=True)
class Qwen3NextConfig(DecoderConfig):
    delta: DeltaSizes

    @property
    def query_rows(self) -> int:
        return 2 * self.num_heads * self.head_dim  # each head's gate behind its query


def read_qwen3_next(keys: ConfigKeys, max_len: int | None, ffn_size: int | None = None) -> Qwen3NextConfig:
    """Read the configuration, without experts; ``ffn_size`` is the default of ``intermediate_size``."""
    rope = {key: value for key, value in rope_values(keys).items() if key not in OF_IMAGES}
    keys.must_be(ONE_ACTIVATION)
    num_layers, every = keys.size("num_hidden_layers"), keys.size("full_attention_interval", 4)
    norm = NormPart(offset=norm_offset(keys))
    config = read_decoder(
        keys, max_len, head_dim=256, rotary=0.25, rope=rope, windows=NO_WINDOWS, ffn_size=ffn_size, norm=norm
    )
    types = keys.choices("layer_types", (LINEAR, FULL), num_layers)
    types = types or tuple(FULL if (i + 1) % every == 0 else LINEAR for i in range(num_layers))
    if not keys.flag("attn_output_gate", True):
        raise wrong("attn_output_gate", False, "true")
    keys.choice("output_gate_type", {"swish": None, "silu": None}, "swish")
    keys.pass_over("mamba_ssm_dtype", "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings")
    delta = DeltaSizes(
        keys.size("linear_num_key_heads", 16),
        keys.size("linear_num_value_heads", 32),
        keys.size("linear_key_head_dim", 128),
        keys.size("linear_value_head_dim", 128),
        keys.size("linear_conv_kernel_dim", 4, low=2),
        keys.flag("has_tiled_heads"),
    )
    if delta.num_heads % delta.num_key_heads:
        raise wrong("linear_num_value_heads", delta.num_heads, f"a multiple of {delta.num_key_heads} key heads")
    config = config.with_attention(head_norm=HeadNorm(offset=norm.offset), gate=GatePart(None))
    config = config.with_caches([delta.cache if kind == LINEAR else None for kind in types])
    return config.extended(Qwen3NextConfig, delta=delta)


class Qwen3NextLayer(HybridLayer):
    """A layer with the gated delta rule, or with gated attention; then the feed-forward layer."""

    def load_recurrence(self, config: DecoderConfig, weights: WeightLoader, prefix: str) -> Recurrence:
        assert isinstance(config, Qwen3NextConfig)
        sizes, name = config.delta, f"{prefix}.linear_attn"
        heads = delta_heads(sizes, weights, name, config.norm_eps)
        projections = weights.fused(self.projections(sizes, name, weights), config.hidden_size)
        conv_WC = weights.conv([f"{name}.conv1d"], sizes.channels, sizes.width)
        self.o_proj = self.output(config, weights, name)
        norm = None if self.before_attention is None else self.input_norm
        return GatedDelta(norm, projections, conv_WC, heads)

    def output(self, config: Qwen3NextConfig, weights: WeightLoader, name: str) -> Linear | RowParallelLinear:
        """The map of the heads' outputs; where these are tiled, ranks cannot divide it, nor can adapters change it."""
        sizes, output = config.delta, f"{name}.out_proj"
        is_tiled = sizes.is_tiled and sizes.num_key_heads < sizes.num_heads
        if is_tiled and weights.collective.size > 1:
            raise CheckpointError(f"{output}: the heads of its inputs are not in order, so ranks cannot divide it")
        projection = weights.row(output, config.hidden_size, sizes.values)
        if is_tiled:
            del weights.maps[output]
        return projection

    def projections(self, sizes: DeltaSizes, name: str, weights: WeightLoader) -> list[MatrixRows]:
        """The stored matrices, whose rows are queries, keys, values, gates, betas and time steps in this order; here
        they are grouped by key head in the checkpoint, all of them or, in GGUF files, the last two."""
        G, per_key = sizes.num_key_heads, sizes.num_heads // sizes.num_key_heads
        values = per_key * sizes.value_dim
        gates, heads = Section(sizes.values, G), Section(sizes.num_heads, G)
        last = MatrixRows(f"{name}.in_proj_ba", [heads, heads], by_part(G, [per_key] * 2))
        if weights.tensors.has_module(f"{name}.in_proj_z"):
            return [MatrixRows(f"{name}.in_proj_qkv", sizes.channels), MatrixRows(f"{name}.in_proj_z", [gates]), last]
        order = by_part(G, [sizes.key_dim] * 2 + [values] * 2)
        return [MatrixRows(f"{name}.in_proj_qkvz", [*sizes.channels, gates], order), last]

    def qkv(self, config: DecoderConfig, weights: WeightLoader, prefix: str) -> Linear:
        """Gates, queries, keys and values side by side; the checkpoint has each head's gate behind its query."""
        N, K, H = self.heads[:3]
        queries, keys = Section(N * H, N), Section(K * H, K)
        order = by_part(N, [H, H]).reshape(2, -1)[::-1].ravel()
        parts = [MatrixRows(f"{prefix}.self_attn.q_proj", [queries, queries], order)]
        parts += [MatrixRows(f"{prefix}.self_attn.{part}_proj", [keys]) for part in "kv"]
        return weights.fused(parts, config.hidden_size, self.part.has_bias)


def delta_heads(
    sizes: DeltaSizes, weights: WeightLoader, name: str, eps: float, norm: str = "norm", decays_of_head: int = 1
) -> DeltaHeads:
    """This device's heads of the layer with weights ``name``, whose heads have so many decays each."""
    num_key_heads = weights.num_own(sizes.num_key_heads)
    own = Section(sizes.num_heads, sizes.num_key_heads)
    a_log_N = weights.exact_part(f"{name}.A_log", own)
    dt_bias = weights.exact_part(f"{name}.dt_bias", own._replace(num_rows=sizes.num_heads * decays_of_head))
    norm_V = weights.dense(f"{name}.{norm}.weight", sizes.value_dim)
    return DeltaHeads(
        num_key_heads,
        num_heads=len(a_log_N),
        key_dim=sizes.key_dim,
        value_dim=sizes.value_dim,
        a_log_N=a_log_N,
        dt_bias=dt_bias,
        norm_V=norm_V,
        norm_eps=eps,
        is_tiled=sizes.is_tiled,
        gate=sizes.gate,
    )


def by_part(num_heads: int, sizes: list[int]) -> npt.NDArray[np.int64]:
    """Index of the stored row for each row; each head stores parts of these sizes, which are to be put together."""
    starts = np.arange(num_heads)[:, None] * sum(sizes)
    ends = np.cumsum(sizes)
    return np.concatenate(
        [(starts + np.arange(end - size, end)).ravel() for end, size in zip(ends, sizes, strict=True)]
    )


class Qwen3NextForCausalLM(Decoder):
    layer_class = Qwen3NextLayer

    @classmethod
    def read_config(cls, keys: ConfigKeys, max_len: int | None) -> DecoderConfig:
        return with_qwen_experts(keys, read_qwen3_next(keys, max_len), 10, normalises=True, shared_size=512)
