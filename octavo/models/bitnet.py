"""BitNet b1.58 (Microsoft, arXiv 2402.17764 and 2504.12285): Llama with more norms, and gates of squared ReLUs.

The norms are before the projections of what attention and the feed-forward layer give. Matrices hold -1, 0 and 1
(``quant.formats.bitnet``).

Shapes: T tokens, N heads, F ffn.
"""

from __future__ import annotations

from torch import Tensor

from octavo import ops
from octavo.layers.attention_inputs import StepAngles
from octavo.layers.mlp import MLP
from octavo.layers.norm import RMSNorm
from octavo.models.config_keys import ConfigKeys
from octavo.models.decoder import PLAIN_ACTIVATIONS, Decoder, read_decoder
from octavo.models.decoder_layer import DecoderLayer, FeedForward
from octavo.models.loader import WeightLoader
from octavo.models.parts import DecoderConfig
from octavo.ops.attention.attention import LayerCache, PagedRows


class NormedSquares:
    """``norm(max(gate, 0)^2 * up)`` of rows [T, 2 F] of gates, then ups."""

    def __init__(self, norm: RMSNorm) -> None:
        self.norm = norm

    def __call__(self, gate_up_TW: Tensor) -> Tensor:
        gates_TF, ups_TF = gate_up_TW.chunk(2, dim=-1)
        return self.norm(ops.squared_relu(ops.concat(gates_TF)).mul_(ups_TF))


class BitNetLayer(DecoderLayer):
    def load_mixer(self, config: DecoderConfig, weights: WeightLoader, prefix: str, index: int) -> None:
        super().load_mixer(config, weights, prefix, index)
        name = f"{prefix}.self_attn.attn_sub_norm"
        self.inner_norm = weights.head_norm(name, self.part.num_heads, self.part.head_dim, config.norm_eps)

    def mix(self, x_TD: Tensor, step: StepAngles, cache: LayerCache, rows: PagedRows) -> Tensor:
        return self.inner_norm(super().mix(x_TD, step, cache, rows))

    def feed_forward(self, config: DecoderConfig, weights: WeightLoader, prefix: str, index: int) -> FeedForward:
        F, D, names = config.ffn_size, config.hidden_size, config.names
        before = self.stream_norm(config, weights, prefix, names.before_mlp)
        up = weights.gate_up([f"{prefix}.{name}" for name in names.ups], F, D)
        down = weights.row(f"{prefix}.{names.down}", D, F)
        norm = weights.head_norm(f"{prefix}.mlp.ffn_sub_norm", F, 1, config.norm_eps)
        return MLP(before, up, down, NormedSquares(norm), None)


class BitNetForCausalLM(Decoder):
    layer_class = BitNetLayer

    @classmethod
    def read_config(cls, keys: ConfigKeys, max_len: int | None) -> DecoderConfig:
        relu2 = {"relu2": PLAIN_ACTIVATIONS["relu2"]}
        return read_decoder(
            keys, max_len, eps=1e-5, theta=500_000.0, mlp_bias=False, activation="relu2", activations=relu2
        )
