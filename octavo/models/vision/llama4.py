"""The vision tower of Llama 4 (Meta, 2025): tiles in patches whose rows and columns rotate queries and keys.

Of two halves of a head's pairs, the first rotates by the column and the other by the row, both counted from 1. A token
for the tile stands behind its patches, does not rotate, and is dropped at the end.

Shapes: B tiles, N patches of a tile, D width of the tower, R rotated pairs of a head.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from octavo.models.config_keys import ConfigKeys, wrong
from octavo.models.loader import WeightLoader
from octavo.models.vision.siglip import SiglipConfig, SiglipLayer, read_siglip
from octavo.models.vision.tower import Pixels, VisionConfig
from octavo.models.vision.tower_parts import (
    ACTIVATIONS,
    Affine,
    Feedforward,
    LayerNorm,
    in_halves,
    merged,
    normalised,
    part,
    patches,
    places,
    read_merge,
    read_theta,
    turns,
)


@dataclass(frozen=True, kw_only=True)
class Llama4Config(VisionConfig):
    siglip: SiglipConfig
    merge: int
    adapter_size: int
    output_size: int
    """Numbers of an embedding before it is projected to the decoder's width."""
    theta: float


class Llama4Tower:
    """See the module's docstring."""

    @classmethod
    def read_config(cls, keys: ConfigKeys) -> Llama4Config:
        inner = part(keys, "vision_config")
        siglip = read_siglip(inner, "gelu", depth=34, ffn_size=5632, num_heads=16, patch=14, image=448)
        merge = read_merge(inner, "pixel_shuffle_ratio")
        if siglip.side % merge:
            raise wrong("vision_config.pixel_shuffle_ratio", 1 / merge, f"one that divides {siglip.side} patches")
        return Llama4Config(
            hidden_size=part(keys, "text_config").size("hidden_size", 5120),
            siglip=dataclasses.replace(siglip, eps=1e-5),
            merge=merge,
            adapter_size=inner.size("projector_input_dim", 4096),
            output_size=inner.size("projector_output_dim", 4096),
            theta=read_theta(inner, 10_000.0),
        )

    own_names: ClassVar = {
        ".input_layernorm.": ".layer_norm1.",
        ".post_attention_layernorm.": ".layer_norm2.",
        ".self_attn.o_proj.": ".self_attn.out_proj.",
    }
    """Parts of weights' names, and what SigLIP's layers have in their place."""

    def __init__(self, config: Llama4Config, weights: WeightLoader) -> None:
        self.config, self.form, siglip = config, weights.form, config.siglip
        D, name = siglip.width, "vision_model"
        self.patch_map = weights.dense(f"{name}.patch_embedding.linear.weight", D, 3 * siglip.patch**2)
        self.tile_token = weights.dense(f"{name}.class_embedding", D)
        self.places = weights.dense(f"{name}.positional_embedding_vlm", siglip.side**2 + 1, D)
        self.norms = [LayerNorm(weights, f"{name}.layernorm_{end}", D, siglip.eps) for end in ("pre", "post")]
        self.layers = [SiglipLayer(siglip, weights, f"{name}.model.layers.{i}") for i in range(siglip.depth)]
        for layer in self.layers:
            for affine in layer.qkv[:2]:
                for stored in (affine.weight, affine.bias):
                    assert stored is not None
                    stored.copy_(in_halves(stored, siglip.num_heads))
        names, inner = (f"{name}.vision_adapter.mlp.fc1", f"{name}.vision_adapter.mlp.fc2"), D * config.merge**2
        sizes = inner, config.adapter_size, config.output_size
        self.adapter = Feedforward(weights, names, sizes, ACTIVATIONS["gelu"], has_bias=False)
        size = config.hidden_size, config.output_size
        self.map = Affine(weights, "multi_modal_projector.linear_1", size, has_bias=False)
        self.angles = self._angles()

    def _angles(self) -> tuple[Tensor, Tensor]:
        """Cosines and sines of all patches, and of the token behind them: [N + 1, R]."""
        siglip, theta = self.config.siglip, self.config.theta
        row, column = places(siglip.side, siglip.side, 1, self.form.device) + 1
        width = siglip.width // siglip.num_heads // 2
        angles = torch.cat([turns(place, width, theta) for place in (column, row)], dim=-1)
        angles = torch.cat([angles, torch.zeros_like(angles[:1])])
        return angles.cos(), angles.sin()

    def __call__(self, image: Pixels) -> Tensor:
        """The embeddings of an image, tile by tile."""
        tiles = normalised(image.pixels, image.mean, image.deviation)
        flat = patches(tiles, self.config.siglip.patch).to(self.form.dtype)
        x_BND = functional.linear(flat, self.patch_map)
        x_BND = torch.cat([x_BND, self.tile_token.expand(len(x_BND), 1, -1)], dim=1) + self.places
        x_BND = self.norms[0](x_BND)
        cos, sin = (part.repeat(len(x_BND), 1) for part in self.angles)
        for layer in self.layers:
            x_BND = layer(x_BND, (cos, sin))
        windows = merged(self.norms[1](x_BND)[:, :-1], self.config.merge)
        return self.map(functional.gelu(self.adapter(windows))).flatten(0, 1)
