"""Apertus (arXiv 2509.14233): norms of each head, and feed-forward layers without gates whose activation, xIELU, is
learned."""

from __future__ import annotations

from torch.nn import functional

from octavo.layers.mlp import MLP, XIELU, gelu
from octavo.models.config_keys import ConfigKeys
from octavo.models.decoder import Decoder, read_decoder
from octavo.models.decoder_layer import DecoderLayer, FeedForward
from octavo.models.loader import WeightLoader
from octavo.models.parts import DecoderConfig, HeadNorm, Names
from octavo.models.rope_keys import rope_values

NAMES = Names(before_attention="attention_layernorm", before_mlp="feedforward_layernorm", ups=("mlp.up_proj",))
ROPE = {
    "rope_type": "llama3",
    "rope_theta": 12_000_000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
"""The default rotary embedding."""
BETA, EPS = 0.5, -1e-6


class ApertusLayer(DecoderLayer):
    def feed_forward(self, config: DecoderConfig, weights: WeightLoader, prefix: str, index: int) -> FeedForward:
        mlp = super().feed_forward(config, weights, prefix, index)
        assert isinstance(mlp, MLP)
        given = [weights.exact(f"{prefix}.mlp.act_fn.{name}", 1) for name in ("alpha_p", "alpha_n")]
        positive, negative = (weights.constant(functional.softplus(value)) for value in given)
        for name in ("beta", "eps"):  # which are constants
            weights.tensors.leave_out(f"{prefix}.mlp.act_fn.{name}")
        mlp.activation = XIELU(positive, BETA + negative, BETA, EPS)
        return mlp


class ApertusForCausalLM(Decoder):
    layer_class = ApertusLayer

    @classmethod
    def read_config(cls, keys: ConfigKeys, max_len: int | None) -> DecoderConfig:
        given = any(keys.get(key) is not None for key in ("rope_parameters", "rope_scaling", "rope_theta"))
        config = read_decoder(
            keys,
            max_len,
            eps=1e-5,
            activation="xielu",
            activations={"xielu": gelu},  # which is replaced by the learned one of each layer
            rope=rope_values(keys) if given else ROPE,
            names=NAMES,
            mlp_bias=False,
        )
        return config.with_attention(head_norm=HeadNorm())
