"""Mamba (arXiv 2312.00752) and Falcon-Mamba (arXiv 2410.05355): layers with recurrent state alone."""

from __future__ import annotations

from octavo.layers.norm import RMSNorm
from octavo.layers.recurrent import Mamba
from octavo.models.config_keys import ConfigKeys
from octavo.models.decoder import Decoder
from octavo.models.hybrid import ScanSizes, load_mamba, read_rank
from octavo.models.loader import WeightLoader
from octavo.models.mamba2 import Mamba2Layer, RecurrentConfig, read_recurrent


class MambaLayer(Mamba2Layer):
    def mixer(self, config: RecurrentConfig, weights: WeightLoader, name: str, norm: RMSNorm) -> Mamba:
        assert isinstance(config.mamba, ScanSizes)
        return load_mamba(weights, name, config.mamba, config.hidden_size, norm)


class MambaForCausalLM(Decoder):
    layer_class = MambaLayer

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
    keys.pass_over(*UNUSED)
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
