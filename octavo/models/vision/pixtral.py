"""The vision tower of Pixtral (arXiv 2410.07073), also with its projection in Mistral Small 3 and Ministral 3.

Images of any size in patches; rows and columns rotate queries and keys. A patch makes an embedding, or four of them.

Shapes: N patches, D width of the tower, R rotated pairs of a head.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from octavo.models.config_keys import ConfigKeys, wrong
from octavo.models.loader import WeightLoader
from octavo.models.vision.qwen import QwenBlock, QwenConfig
from octavo.models.vision.tower import Pixels
from octavo.models.vision.tower_parts import (
    ACTIVATIONS,
    Activation,
    Affine,
    Feedforward,
    PatchMap,
    RMSNorm,
    normalised,
    part,
    places,
    read_theta,
    turns,
)


@dataclass(frozen=True, kw_only=True)
class PixtralConfig(QwenConfig):
    theta: float
    projector_eps: float = 0.0
    """Of the norm before four patches become one."""
    projector_activation: Activation
    projector_bias: bool


class PixtralTower:
    """The tower of Pixtral in transformers' LLaVA."""

    own_names: ClassVar = {
        ".attention_norm.": ".norm1.",
        ".ffn_norm.": ".norm2.",
        ".attention.o_proj.": ".attn.proj.",
        **{f".attention.{part}_proj.": f".attn.{part}." for part in "qkv"},
        ".feed_forward.": ".mlp.",
    }
    """Parts of weights' names, and what Qwen's blocks have in their place."""
    has_bias = True
    """Whether the projection has biases by default."""

    @classmethod
    def read_config(cls, keys: ConfigKeys) -> PixtralConfig:
        inner, text = part(keys, "vision_config"), part(keys, "text_config")
        layer = keys.get("vision_feature_layer", -1)
        if layer != -1:
            raise wrong("vision_feature_layer", layer, "-1, the last layer")
        return PixtralConfig(
            hidden_size=text.size("hidden_size"),
            depth=inner.size("num_hidden_layers", 24),
            width=inner.size("hidden_size", 1024),
            ffn_size=inner.size("intermediate_size", 4096),
            num_heads=inner.size("num_attention_heads", 16),
            patch=inner.size("patch_size", 16),
            is_gated=True,
            is_split=True,
            has_bias=False,
            has_qkv_bias=False,
            eps=1e-5,
            theta=read_theta(inner, 10_000.0),
            activation=inner.choice("hidden_act", ACTIVATIONS, "gelu"),
            projector_activation=keys.choice("projector_hidden_act", ACTIVATIONS, "gelu"),
            projector_bias=keys.flag("multimodal_projector_bias", cls.has_bias),
        )

    def __init__(self, config: PixtralConfig, weights: WeightLoader) -> None:
        self.config, self.form = config, weights.form
        D, name = config.width, "vision_tower"
        self.patch_map = PatchMap(weights, f"{name}.patch_conv", D, config.patch, has_bias=False)
        self.norm = RMSNorm(weights, f"{name}.ln_pre", D, 1e-5)
        prefix = f"{name}.transformer.layers"
        self.layers = [QwenBlock(config, weights, f"{prefix}.{i}") for i in range(config.depth)]
        names, wide = ("multi_modal_projector.linear_1", "multi_modal_projector.linear_2"), config.hidden_size
        activation = config.projector_activation
        self.map = Feedforward(weights, names, (D, wide, wide), activation, config.projector_bias)

    def __call__(self, image: Pixels) -> Tensor:
        """The embeddings of an image, row by row; tokens end the rows."""
        return self.map(self.merged(*self.encoded(image)))

    def merged(self, x_ND: Tensor, rows: int, columns: int) -> Tensor:
        """The patches, or what several of them become."""
        return x_ND

    def encoded(self, image: Pixels) -> tuple[Tensor, int, int]:
        """The last layer's output [N, D], and rows and columns of patches."""
        config = self.config
        image_YXC = normalised(image.pixels[0], image.mean, image.deviation)
        rows, columns = image_YXC.shape[0] // config.patch, image_YXC.shape[1] // config.patch
        x_ND = self.norm(self.patch_map(image_YXC))
        angles = self.angles(rows, columns)
        for layer in self.layers:
            x_ND = layer(x_ND, angles)
        return x_ND, rows, columns

    def angles(self, rows: int, columns: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines of all patches, [N, R]: pairs of even number turn with the row, others with the column."""
        H, at = self.config.width // self.config.num_heads, places(rows, columns, 1, self.form.device)
        parts = [turns(place, H, self.config.theta, first=2 * axis, every=4) for axis, place in enumerate(at)]
        angles = torch.cat(parts, dim=-1)
        return angles.cos(), angles.sin()


class Mistral3Tower(PixtralTower):
    """The tower of Mistral Small 3 and Ministral 3."""

    has_bias = False

    @classmethod
    def read_config(cls, keys: ConfigKeys) -> PixtralConfig:
        eps = part(keys, "text_config").number("rms_norm_eps", 1e-5)
        config = super().read_config(keys)
        return dataclasses.replace(config, merge=keys.size("spatial_merge_size", 2), projector_eps=eps)

    def __init__(self, config: PixtralConfig, weights: WeightLoader) -> None:
        super().__init__(config, weights)
        D, name = config.width, "multi_modal_projector"
        self.merger_norm = RMSNorm(weights, f"{name}.norm", D, config.projector_eps)
        self.merger = Affine(weights, f"{name}.patch_merger.merging_layer", (D, D * config.merge**2), has_bias=False)

    def merged(self, x_ND: Tensor, rows: int, columns: int) -> Tensor:
        m = self.config.merge
        new_rows, new_columns = rows // m, columns // m  # in LightOnOCR a last row may be left out
        grid = self.merger_norm(x_ND).view(rows, columns, -1)[: new_rows * m, : new_columns * m]
        windows = grid.reshape(new_rows, m, new_columns, m, -1).permute(0, 2, 4, 1, 3)
        return self.merger(windows.reshape(new_rows * new_columns, -1))


class LightOnTower(Mistral3Tower):
    """The tower of LightOnOCR (LightOn), the same with other names."""

    own_names: ClassVar = {
        "vision_projection.": "multi_modal_projector.",
        "vision_encoder.": "vision_tower.",
        **PixtralTower.own_names,
    }
