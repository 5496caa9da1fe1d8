"""What models share whose layers differ in kind: recurrent layers, attention, feed-forward layers alone.

Shapes: T tokens of the step, D model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from octavo.layers.attention_inputs import StepAngles
from octavo.layers.norm import RMSNorm
from octavo.layers.recurrent import GatedNorm, Mamba, Mamba2
from octavo.models.config_keys import ONE_ACTIVATION, ConfigKeys, wrong
from octavo.models.decoder_layer import DecoderLayer
from octavo.models.layer_cache import LayerCacheSpec, StateTensor, conv_state, recurrent_state, state_layer
from octavo.models.linear_parts import MatrixRows
from octavo.models.loader import WeightLoader
from octavo.models.parts import DecoderConfig
from octavo.ops.attention.attention import LayerCache, PagedRows
from octavo.ops.recurrent.selective_scan import ScanChannels
from octavo.ops.recurrent.state_space import StateSpaceHeads
from octavo.quant.stored.shard import Section

FULL, LINEAR = "full_attention", "linear_attention"


Recurrence = Callable[[Tensor, LayerCache, PagedRows], Tensor]
"""A layer's recurrence with the norm before it: the residual stream, what is cached of the layer, and the rows."""


class HybridLayer(DecoderLayer):
    """A layer of attention or, where the configuration says so, of a recurrence; then the feed-forward layer."""

    recurrence: Recurrence | None = None

    def load_mixer(self, config: DecoderConfig, weights: WeightLoader, prefix: str, index: int) -> None:
        if not config.layers[index].is_recurrent:
            return super().load_mixer(config, weights, prefix, index)
        self.recurrence = self.load_recurrence(config, weights, prefix)
        return None

    def load_recurrence(self, config: DecoderConfig, weights: WeightLoader, prefix: str) -> Recurrence:
        """Load the recurrence, and the projection ``o_proj`` of its outputs."""
        raise NotImplementedError

    def mix(self, x_TD: Tensor, step: StepAngles, cache: LayerCache, rows: PagedRows) -> Tensor:
        return super().mix(x_TD, step, cache, rows) if self.recurrence is None else self.recurrence(x_TD, cache, rows)


def layer_kinds(keys: ConfigKeys, key: str, allowed: Sequence[str], count: int) -> tuple[str, ...]:
    """The kinds of the layers, which the configuration must have."""
    kinds = keys.choices(key, allowed, count)
    if kinds is None:
        raise wrong(key, None, f"a list of {count}, each one of {', '.join(allowed)}")
    return kinds


class MambaSizes(NamedTuple):
    """Sizes of a layer of Mamba-2."""

    num_heads: int
    head_dim: int
    num_groups: int
    state_size: int
    width: int
    """Of the convolution."""
    has_conv_bias: bool
    has_bias: bool
    """Whether projections have biases."""
    limits: tuple[float, float] = (0.0, math.inf)
    has_norm: bool = True
    """Whether outputs are normalised, not only gated."""
    is_gated_first: bool = True
    scales: tuple[float, ...] = ()
    """Factors of z, x, b, c and dt; none: all 1."""

    @property
    def inner(self) -> int:
        """Numbers of all heads."""
        return self.num_heads * self.head_dim

    @property
    def channels(self) -> list[Section]:
        """Those of the convolution, which ranks divide by groups."""
        shared = self.num_groups * self.state_size
        return [Section(size, self.num_groups) for size in (self.inner, shared, shared)]

    @property
    def cache(self) -> LayerCacheSpec:
        channels = sum(section.num_rows for section in self.channels)
        return state_layer(
            conv_state(self.width, channels, self.num_groups),
            recurrent_state(self.num_heads, self.state_size, self.head_dim, self.num_groups),
        )


INFINITY = {"__float__": "Infinity"}
"""How transformers writes it into JSON."""


def read_limits(keys: ConfigKeys, key: str = "time_step_limit") -> tuple[float, float]:
    """The smallest and the largest time step."""
    given = keys.get(key, (0.0, math.inf))
    values = [math.inf if value == INFINITY else value for value in given] if isinstance(given, list | tuple) else []
    if [type(value) in (int, float) for value in values] != [True, True] or not 0 <= values[0] <= values[1]:
        raise wrong(key, given, "a list of two numbers, the first not larger than the second")
    return float(values[0]), float(values[1])


def read_bamba_sizes(keys: ConfigKeys, hidden_size: int, inner: int | None = None) -> MambaSizes:
    """The sizes of Mamba-2 layers by the names of Bamba and Granite; ``inner``: the numbers of all heads, if given."""
    keys.must_be(ONE_ACTIVATION)
    heads, expanded = keys.size("mamba_n_heads", 128), keys.size("mamba_expand", 2) * hidden_size
    inner = inner or expanded
    head_dim = keys.get("mamba_d_head", "auto")
    if inner % heads or head_dim not in ("auto", inner // heads):
        raise wrong("mamba_d_head", head_dim, f"such that {heads} heads have {inner} numbers")
    groups = keys.size("mamba_n_groups", 1)
    if heads % groups:
        raise wrong("mamba_n_groups", groups, f"a divisor of mamba_n_heads, {heads}")
    keys.get("mamba_chunk_size")
    return MambaSizes(
        num_heads=heads,
        head_dim=inner // heads,
        num_groups=groups,
        state_size=keys.size("mamba_d_state", 256),
        width=keys.size("mamba_d_conv", 4, low=2),
        has_conv_bias=keys.flag("mamba_conv_bias", True),
        has_bias=keys.flag("mamba_proj_bias"),
        limits=read_limits(keys),
    )


def load_mamba2(
    weights: WeightLoader, name: str, sizes: MambaSizes, hidden_size: int, norm: RMSNorm, eps: float
) -> Mamba2:
    """The layer with weights ``name``, without its output projection."""
    heads, gates = Section(sizes.num_heads, sizes.num_groups), Section(sizes.inner, sizes.num_groups)
    a_log_N, dt_bias_N, d_N = (weights.exact_part(f"{name}.{part}", heads) for part in ("A_log", "dt_bias", "D"))
    projections = weights.fused(
        [MatrixRows(f"{name}.in_proj", [gates, *sizes.channels, heads])], hidden_size, sizes.has_bias
    )
    bias_C = weights.exact_parts(f"{name}.conv1d.bias", sizes.channels) if sizes.has_conv_bias else None
    layout = StateSpaceHeads(
        num_heads=len(a_log_N),
        head_dim=sizes.head_dim,
        num_groups=weights.num_own(sizes.num_groups),
        state_size=sizes.state_size,
        a_log_N=a_log_N,
        dt_bias_N=dt_bias_N,
        d_N=d_N,
        dt_limits=sizes.limits,
    )
    conv = weights.conv([f"{name}.conv1d"], sizes.channels, sizes.width), bias_C
    gated_norm = scales_W = None
    if sizes.has_norm:
        norm_C, group = weights.exact_part(f"{name}.norm.weight", gates), sizes.inner // sizes.num_groups
        gated_norm = GatedNorm(norm_C, eps, group, sizes.is_gated_first)
    if sizes.scales:
        widths = layout.num_heads * layout.head_dim, *layout.sizes, layout.num_heads
        scales_W = torch.tensor(sizes.scales).repeat_interleave(torch.tensor(widths)).to(weights.form.device)
    return Mamba2(norm, projections, conv, layout, gated_norm, scales_W)


class ScanSizes(NamedTuple):
    """Sizes of a layer of Mamba."""

    inner: int
    """Channels."""
    state_size: int
    rank: int
    """Of the map to time steps."""
    width: int
    """Of the convolution."""
    has_conv_bias: bool
    has_bias: bool
    """Whether the outer projections have biases."""
    norms: tuple[str, ...] = ()
    """Names of the norms of time steps, b and c; none: they have none."""
    norm_eps: float = 0.0
    has_norm_weights: bool = True

    @property
    def channels(self) -> Section:
        """Each of which a rank may have."""
        return Section(self.inner, self.inner)

    @property
    def cache(self) -> LayerCacheSpec:
        state = StateTensor((1, self.state_size, self.inner), 2, self.inner, is_recurrent=True)
        return state_layer(conv_state(self.width, self.inner, self.inner), state)


def read_rank(keys: ConfigKeys, key: str, hidden_size: int) -> int:
    """The rank of the map to time steps, by default a sixteenth of the hidden size, rounded up."""
    return -(-hidden_size // 16) if keys.get(key, "auto") == "auto" else keys.size(key)


def load_mamba(weights: WeightLoader, name: str, sizes: ScanSizes, hidden_size: int, norm: RMSNorm) -> Mamba:
    """The layer with weights ``name``, without its output projection."""
    C, K, R, own = sizes.inner, sizes.state_size, sizes.rank, sizes.channels
    channels = ScanChannels(
        weights.exact_columns(f"{name}.A_log", own, K),
        weights.exact_part(f"{name}.dt_proj.bias", own),
        weights.exact_part(f"{name}.D", own),
    )
    norms = []
    for part, size in zip(sizes.norms, (R, K, K), strict=False):
        if sizes.has_norm_weights:
            norms.append(weights.norm(f"{name}.{part}", size, sizes.norm_eps))
        else:
            ones = torch.ones(size, dtype=weights.form.dtype, device=weights.form.device)
            norms.append(RMSNorm(ones, sizes.norm_eps))
    return Mamba(
        norm,
        weights.fused([MatrixRows(f"{name}.in_proj", [own, own])], hidden_size, sizes.has_bias),
        (
            weights.conv([f"{name}.conv1d"], [own], sizes.width),
            weights.exact_part(f"{name}.conv1d.bias", own) if sizes.has_conv_bias else None,
        ),
        weights.row(f"{name}.x_proj", R + 2 * K, C),
        weights.fused([MatrixRows(f"{name}.dt_proj", [own])], R),
        channels,
        tuple(norms),
    )


@dataclass(frozen=True, kw_only=True)
class MambaConfig(DecoderConfig):
    """Of a model with layers of Mamba-2, or of Mamba."""

    mamba: MambaSizes | ScanSizes


class MambaLayer(HybridLayer):
    """Mamba-2, or Mamba, or attention; then the feed-forward layer."""

    mamba = "mamba"
    """Name of its weights within a layer."""

    def load_recurrence(self, config: DecoderConfig, weights: WeightLoader, prefix: str) -> Recurrence:
        assert isinstance(config, MambaConfig)
        D, name, sizes = config.hidden_size, f"{prefix}.{self.mamba}", config.mamba
        self.o_proj = weights.row(f"{name}.out_proj", D, sizes.inner, sizes.has_bias)
        if isinstance(sizes, ScanSizes):
            return load_mamba(weights, name, sizes, D, self.input_norm)
        return load_mamba2(weights, name, sizes, D, self.input_norm, config.norm_eps)
