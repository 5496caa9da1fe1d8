"""Mamba (arXiv 2312.00752), Falcon-Mamba (arXiv 2410.05355), Mamba-2 (arXiv 2405.21060): recurrent layers alone."""

from __future__ import annotations

from octavo.models.config_keys import ConfigKeys, wrong
from octavo.models.decoder import NO_WINDOWS, Decoder, read_decoder
from octavo.models.decoder_layer import FeedForward, no_feed_forward
from octavo.models.hybrid import MambaConfig, MambaLayer, MambaSizes, ScanSizes, read_limits, read_rank
from octavo.models.loader import WeightLoader
from octavo.models.parts import DecoderConfig, Names

NAMES = Names(
    embedding="backbone.embeddings", layers="backbone.layers", norm="backbone.norm_f", before_attention="norm"
)
LONGEST = 1 << 20
"""Tokens of a context, where the configuration states no limit: none is built in."""
UNUSED = (
    *("residual_in_fp32", "rescale_prenorm_residual", "time_step_min", "time_step_max", "time_step_floor"),
    *("time_step_scale", "time_step_init_scheme", "use_mambapy", "use_falcon_mambapy", "use_associative_scan"),
    *("chunk_size", "layer_types", "rms_norm", "norm_before_gate"),
)
"""Keys of training, of other implementations, and what all checkpoints have alike."""


class RecurrentLayer(MambaLayer):
    """A recurrence without a feed-forward layer."""

    mamba = "mixer"

    def feed_forward(self, config: DecoderConfig, weights: WeightLoader, prefix: str, index: int) -> FeedForward:
        return no_feed_forward


class MambaForCausalLM(Decoder):
    layer_class = RecurrentLayer

    @classmethod
    def read_config(cls, keys: ConfigKeys, max_len: int | None) -> MambaConfig:
        return read_recurrent(keys, read_sizes(keys), tied=True)


class FalconMambaForCausalLM(MambaForCausalLM):
    @classmethod
    def read_config(cls, keys: ConfigKeys, max_len: int | None) -> MambaConfig:
        sizes = read_sizes(keys)._replace(
            norms=("dt_layernorm", "b_layernorm", "c_layernorm"),
            norm_eps=keys.number("mixer_rms_eps", 1e-6),
            has_norm_weights=False,
        )
        return read_recurrent(keys, sizes, tied=True)


def read_sizes(keys: ConfigKeys) -> ScanSizes:
    """The sizes of the layers, which all have alike."""
    D = keys.size("hidden_size")
    return ScanSizes(
        inner=keys.size("intermediate_size", keys.size("expand", 2) * D),
        state_size=keys.size("state_size", 16),
        rank=read_rank(keys, "time_step_rank", D),
        width=keys.size("conv_kernel", 4, low=2),
        has_conv_bias=keys.flag("use_conv_bias", True),
        has_bias=keys.flag("use_bias"),
    )


class Mamba2ForCausalLM(Decoder):
    layer_class = RecurrentLayer

    @classmethod
    def read_config(cls, keys: ConfigKeys, max_len: int | None) -> DecoderConfig:
        mamba = MambaSizes(
            num_heads=keys.size("num_heads", 128),
            head_dim=keys.size("head_dim", 64),
            num_groups=keys.size("n_groups", 8),
            state_size=keys.size("state_size", 128),
            width=keys.size("conv_kernel", 4, low=2),
            has_conv_bias=keys.flag("use_conv_bias", True),
            has_bias=keys.flag("use_bias"),
            limits=read_limits(keys),
        )
        D = keys.size("hidden_size")
        if mamba.inner != keys.size("expand", 2) * D:
            raise wrong("expand", mamba.inner / D, "the ratio of num_heads * head_dim to hidden_size")
        keys.get("time_step_rank")
        return read_recurrent(keys, mamba, mamba.num_heads)


def read_recurrent(
    keys: ConfigKeys, mamba: MambaSizes | ScanSizes, num_heads: int | None = None, *, tied: bool = False
) -> MambaConfig:
    """The configuration of a model of such layers alone; ``num_heads``: by which ranks divide them, if not by channels;
    ``tied``: whether the head is the embedding, by default."""
    keys.pass_over(*UNUSED)
    num_layers, heads = keys.size("num_hidden_layers"), num_heads or mamba.inner
    values = {
        **keys.values,
        "intermediate_size": mamba.inner,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": 2,
        "max_position_embeddings": keys.size("max_position_embeddings", LONGEST),
    }
    config = read_decoder(
        keys.over(values),
        None,
        tied=tied,
        eps=1e-5,
        eps_key="layer_norm_epsilon",
        activations={"silu": "silu"},
        windows=NO_WINDOWS,
        names=NAMES,
    )
    config = config.without_rope().with_caches([mamba.cache] * num_layers)
    return config.extended(MambaConfig, mamba=mamba)
