"""Mamba (arXiv 2312.00752) and Falcon-Mamba (arXiv 2410.05355): layers with recurrent state alone."""

from __future__ import annotations

from typing import NamedTuple

import torch

from octavo.layers.mamba import Mamba
from octavo.layers.norm import RMSNorm
from octavo.models.config_keys import ConfigKeys
from octavo.models.hybrid import HybridForCausalLM
from octavo.models.layer_cache import LayerCacheSpec, StateTensor, conv_state, state_layer
from octavo.models.linear_parts import MatrixRows
from octavo.models.loader import WeightLoader
from octavo.models.mamba2 import Mamba2Layer, RecurrentConfig, read_recurrent
from octavo.ops.selective_scan import ScanChannels
from octavo.quant.stored.shard import Section


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
            weights.conv(f"{name}.conv1d", [own], sizes.width),
            weights.exact_part(f"{name}.conv1d.bias", own) if sizes.has_conv_bias else None,
        ),
        weights.row(f"{name}.x_proj", R + 2 * K, C),
        weights.fused([MatrixRows(f"{name}.dt_proj", [own])], R),
        channels,
        tuple(norms),
    )


class MambaLayer(Mamba2Layer):
    def mixer(self, config: RecurrentConfig, weights: WeightLoader, name: str, norm: RMSNorm) -> Mamba:
        assert isinstance(config.mamba, ScanSizes)
        return load_mamba(weights, name, config.mamba, config.hidden_size, norm)


class MambaForCausalLM(HybridForCausalLM):
    layer_class = MambaLayer
    names = ("backbone.embeddings", "backbone.layers", "backbone.norm_f", "lm_head")

    @classmethod
    def read_config(cls, keys: ConfigKeys, max_len: int | None) -> RecurrentConfig:
        return read_recurrent(keys, read_sizes(keys), tied=True)


class FalconMambaForCausalLM(MambaForCausalLM):
    @classmethod
    def read_config(cls, keys: ConfigKeys, max_len: int | None) -> RecurrentConfig:
        sizes = read_sizes(keys)._replace(
            norms=("dt_layernorm", "b_layernorm", "c_layernorm"),
            norm_eps=keys.number("mixer_rms_eps", 1e-6),
            has_norm_weights=False,
        )
        return read_recurrent(keys, sizes, tied=True)


def read_sizes(keys: ConfigKeys) -> ScanSizes:
    """The sizes of the layers, which all have alike."""
    D = keys.size("hidden_size")
    for key in UNUSED:
        keys.get(key)
    return ScanSizes(
        inner=keys.size("intermediate_size", keys.size("expand", 2) * D),
        state_size=keys.size("state_size", 16),
        rank=read_rank(keys, "time_step_rank", D),
        width=keys.size("conv_kernel", 4, low=2),
        has_conv_bias=keys.flag("use_conv_bias", True),
        has_bias=keys.flag("use_bias"),
    )


UNUSED = ("time_step_scale", "time_step_init_scheme", "use_mambapy", "use_falcon_mambapy", "use_associative_scan")
"""Keys of training and of other implementations."""
