"""The vision tower of Llama 4 (Meta, 2025): tiles in patches whose rows and columns rotate queries and keys.

Of two halves of a head's pairs, the first rotates by the column and the other by the row, both counted from 1. A token
for the tile stands behind its patches, does not rotate, and is dropped at the end.

Shapes: B tiles, N patches of a tile, D width of the tower, H head dim.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from octavo.models.config_keys import ConfigKeys, wrong
from octavo.models.loader import WeightLoader
from octavo.models.vision.parts import (
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
)
from octavo.models.vision.siglip import SiglipConfig, SiglipLayer
from octavo.models.vision.tower import Pixels, VisionConfig

OWN_NAMES = (
    (".input_layernorm.", ".layer_norm1."),
    (".post_attention_layernorm.", ".layer_norm2."),
    (".self_attn.o_proj.", ".self_attn.out_proj."),
)
"""Parts of names, and what SigLIP's layers have in their place."""


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
        siglip = SiglipConfig(
            depth=inner.size("num_hidden_layers", 34),
            width=inner.size("hidden_size", 768),
            ffn_size=inner.size("intermediate_size", 5632),
            num_heads=inner.size("num_attention_heads", 16),
            patch=inner.size("patch_size", 14),
            image=inner.size("image_size", 448),
            eps=1e-5,
            activation=ACTIVATIONS["gelu"],
        )
        merge = read_merge(inner, "pixel_shuffle_ratio")
        if siglip.side % merge:
            raise wrong("vision_config.pixel_shuffle_ratio", 1 / merge, f"one that divides {siglip.side} patches")
        return Llama4Config(
            hidden_size=part(keys, "text_config").size("hidden_size", 5120),
            siglip=siglip,
            merge=merge,
            adapter_size=inner.size("projector_input_dim", 4096),
            output_size=inner.size("projector_output_dim", 4096),
            theta=read_theta(inner, 10_000.0),
        )

    @staticmethod
    def own_name(name: str) -> str:
        """The name in SigLIP."""
        for stored, own in OWN_NAMES:
            name = name.replace(stored, own)
        return name

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
        """Cosines and sines of all patches, and of the token behind them: [N + 1, H]."""
        siglip = self.config.siglip
        H, device = siglip.width // siglip.num_heads, self.form.device
        powers = torch.arange(0, H // 2, 2, dtype=torch.float32, device=device) / (H // 2)
        row, column = places(siglip.side, siglip.side, 1, device).float()
        half = torch.cat([(place[:, None] + 1) / self.config.theta**powers for place in (column, row)], dim=-1)
        half = torch.cat([half, torch.zeros_like(half[:1])])
        whole = torch.cat([half, half], dim=-1)
        return whole.cos(), whole.sin()

    def __call__(self, image: Pixels) -> Tensor:
        """The embeddings of an image, tile by tile."""
        tiles = normalised(image.pixels, image.mean, image.deviation)
        flat = torch.stack([patches(tile, self.config.siglip.patch) for tile in tiles]).to(self.form.dtype)
        x_BND = functional.linear(flat, self.patch_map)
        x_BND = torch.cat([x_BND, self.tile_token.expand(len(x_BND), 1, -1)], dim=1) + self.places
        x_BND = self.norms[0](x_BND)
        cos, sin = (part.repeat(len(x_BND), 1) for part in self.angles)
        for layer in self.layers:
            x_BND = layer(x_BND, (cos, sin))
        windows = merged(self.norms[1](x_BND)[:, :-1], self.config.merge)
        return self.map(functional.gelu(self.adapter(windows))).flatten(0, 1)
