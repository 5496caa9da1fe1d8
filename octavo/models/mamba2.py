"""Mamba-2 (arXiv 2405.21060): layers with recurrent state alone."""

from __future__ import annotations

import dataclasses

from octavo.layers.norm import RMSNorm
from octavo.layers.recurrent import Mamba, Mamba2
from octavo.models.config_keys import ConfigKeys, wrong
from octavo.models.decoder import NO_WINDOWS, Decoder, read_decoder
from octavo.models.decoder_layer import FeedForward, no_feed_forward
from octavo.models.hybrid import HybridLayer, MambaSizes, Recurrence, ScanSizes, load_mamba2, read_limits
from octavo.models.loader import WeightLoader
from octavo.models.parts import DecoderConfig, Names

NAMES = Names(
    embedding="backbone.embeddings", layers="backbone.layers", norm="backbone.norm_f", before_attention="norm"
)
LONGEST = 1 << 20
"""Tokens of a context, where the configuration states no limit: none is built in."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecurrentConfig(DecoderConfig):
    """Of a model whose layers are all those of Mamba-2, or of Mamba."""

    mamba: MambaSizes | ScanSizes


class Mamba2Layer(HybridLayer):
    """A recurrence without a feed-forward layer."""

    def load_recurrence(self, config: DecoderConfig, weights: WeightLoader, prefix: str) -> Recurrence:
        assert isinstance(config, RecurrentConfig)
        D, name = config.hidden_size, f"{prefix}.mixer"
        self.o_proj = weights.row(f"{name}.out_proj", D, config.mamba.inner, config.mamba.has_bias)
        return self.mixer(config, weights, name, self.input_norm)

    def mixer(self, config: RecurrentConfig, weights: WeightLoader, name: str, norm: RMSNorm) -> Mamba2 | Mamba:
        """The layer without its output projection."""
        assert isinstance(config.mamba, MambaSizes)
        return load_mamba2(weights, name, config.mamba, config.hidden_size, norm, config.norm_eps)

    def feed_forward(self, config: DecoderConfig, weights: WeightLoader, prefix: str, index: int) -> FeedForward:
        return no_feed_forward


class Mamba2ForCausalLM(Decoder):
    layer_class = Mamba2Layer

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
) -> RecurrentConfig:
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
    config = config.with_attention(rope=None).with_caches([mamba.cache] * num_layers)
    return config.extended(RecurrentConfig, ropes=(), mamba=mamba)


UNUSED = (
    *("residual_in_fp32", "rescale_prenorm_residual", "time_step_min", "time_step_max", "time_step_floor"),
    *("chunk_size", "layer_types", "rms_norm", "norm_before_gate"),
)
"""Keys of training, of other implementations, and what all checkpoints have alike."""
