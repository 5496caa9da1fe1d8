"""Layers that normalise the output of attention and feed-forward before adding it to the residual stream.

Shapes: T tokens of the step, D model.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from octavo.layers.image_attention import attention_with_images
from octavo.layers.norm import RMSNorm
from octavo.models.llama import LlamaConfig, LlamaLayer
from octavo.models.loader import WeightLoader
from octavo.ops.attention import LayerCache, PagedRows


class NormNames(NamedTuple):
    """Names of a layer's norms in the checkpoint; ``None`` for absent norms."""

    input: str | None
    after_attention: str
    before_mlp: str | None
    after_mlp: str


class PostNormLayer(LlamaLayer):
    """A Llama layer with norms after attention and MLP, and optionally before them."""

    names: NormNames

    def __init__(self, config: LlamaConfig, weights: WeightLoader, prefix: str, index: int) -> None:
        D, F = config.hidden_size, config.ffn_size

        def norm(name: str) -> RMSNorm:
            return weights.norm(f"{prefix}.{name}", D, config.norm_eps, config.norm_offset)

        self.before_attention = None if self.names.input is None else norm(self.names.input)
        self.heads = self.head_layout(config, weights, f"{prefix}.self_attn", index)
        self.qkv_proj = self.qkv(config, weights, f"{prefix}.self_attn")
        self.o_proj = weights.row(f"{prefix}.self_attn.o_proj", D, self.heads.sizes[0], config.output_bias)
        self.after_attention = norm(self.names.after_attention)
        self.before_mlp = None if self.names.before_mlp is None else norm(self.names.before_mlp)
        self.gate_up_proj = self.gate_up(config, weights, f"{prefix}.mlp")
        self.down_proj = weights.row(f"{prefix}.mlp.down_proj", D, F, config.mlp_bias)
        self.after_mlp = norm(self.names.after_mlp)
        self.activation = config.activation
        self.heads = weights.own_heads(self.heads)

    def __call__(self, x_TD: Tensor, angles: tuple[Tensor, Tensor], cache: LayerCache, rows: PagedRows) -> Tensor:
        qkv_TW = self.prepare(self.qkv_proj(x_TD, norm=self.before_attention))
        attended_TN, x_TD = rows.pick(attention_with_images(qkv_TW, self.heads, angles, cache, rows), x_TD)
        x_TD = self.after_attention(self.o_proj(attended_TN), x_TD)
        gated_TF = self.gate_up_proj(x_TD, norm=self.before_mlp, activation=self.activation)
        return self.after_mlp(self.down_proj(gated_TF), x_TD)

    def prepare(self, qkv_TW: Tensor) -> Tensor:
        """A hook that transforms the fused queries, keys and values before attention; may overwrite them."""
        return qkv_TW
