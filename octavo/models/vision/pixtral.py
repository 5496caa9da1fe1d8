"""The vision tower of Pixtral (arXiv 2410.07073), also with its projection in Mistral Small 3 and Ministral 3.

Images of any size in patches; rows and columns rotate queries and keys. A patch makes an embedding, or four of them.

Shapes: N patches, D width of the tower, H head dim.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from octavo.models.config_keys import ConfigKeys, wrong
from octavo.models.loader import WeightLoader
from octavo.models.vision.parts import (
    ACTIVATIONS,
    Activation,
    Affine,
    GatedFeedforward,
    RMSNorm,
    attend,
    normalised,
    part,
    patches,
    places,
    read_theta,
    turn,
)
from octavo.models.vision.tower import Pixels, VisionConfig


@dataclass(frozen=True, kw_only=True)
class PixtralConfig(VisionConfig):
    depth: int
    width: int
    ffn_size: int
    num_heads: int
    patch: int
    merge: int = 1
    theta: float
    activation: Activation
    projector_eps: float = 0.0
    """Of the norm before four patches become one."""
    projector_activation: Activation
    projector_bias: bool


class PixtralLayer:
    """Attention and feed-forward layer."""

    def __init__(self, config: PixtralConfig, weights: WeightLoader, prefix: str) -> None:
        D = config.width
        self.num_heads = config.num_heads
        self.attention_norm = RMSNorm(weights, f"{prefix}.attention_norm", D, 1e-5)
        self.ffn_norm = RMSNorm(weights, f"{prefix}.ffn_norm", D, 1e-5)
        self.maps = [Affine(weights, f"{prefix}.attention.{name}_proj", (D, D), has_bias=False) for name in "qkvo"]
        sizes = D, config.ffn_size
        self.mlp = GatedFeedforward(weights, f"{prefix}.feed_forward", sizes, config.activation, has_bias=False)

    def __call__(self, x_ND: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        inner = self.attention_norm(x_ND)
        q, k, v = (affine(inner).view(len(inner), self.num_heads, -1) for affine in self.maps[:3])
        x_ND = x_ND + self.maps[3](attend(turn(q, *angles), turn(k, *angles), v))
        return x_ND + self.mlp(self.ffn_norm(x_ND))


class PixtralTower:
    """The tower of Pixtral in transformers' LLaVA."""

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
            theta=read_theta(inner, 10_000.0),
            activation=inner.choice("hidden_act", ACTIVATIONS, "gelu"),
            projector_activation=keys.choice("projector_hidden_act", ACTIVATIONS, "gelu"),
            projector_bias=keys.flag("multimodal_projector_bias", cls.has_bias),
        )

    def __init__(self, config: PixtralConfig, weights: WeightLoader) -> None:
        self.config, self.form = config, weights.form
        D, P, name = config.width, config.patch, "vision_tower"
        self.patch_map = weights.dense(f"{name}.patch_conv.weight", D, 3, P, P).reshape(D, -1)
        self.norm = RMSNorm(weights, f"{name}.ln_pre", D, 1e-5)
        prefix = f"{name}.transformer.layers"
        self.layers = [PixtralLayer(config, weights, f"{prefix}.{i}") for i in range(config.depth)]
        name, wide, has_bias = "multi_modal_projector", config.hidden_size, config.projector_bias
        self.up = Affine(weights, f"{name}.linear_1", (wide, D), has_bias)
        self.down = Affine(weights, f"{name}.linear_2", (wide, wide), has_bias)

    def __call__(self, image: Pixels) -> Tensor:
        """The embeddings of an image, row by row; tokens end the rows."""
        inner = self.merged(*self.encoded(image))
        return self.down(self.config.projector_activation(self.up(inner)))

    def merged(self, x_ND: Tensor, rows: int, columns: int) -> Tensor:
        """The patches, or what several of them become."""
        return x_ND

    def encoded(self, image: Pixels) -> tuple[Tensor, int, int]:
        """The last layer's output [N, D], and rows and columns of patches."""
        config = self.config
        image_YXC = normalised(image.pixels[0], image.mean, image.deviation)
        rows, columns = image_YXC.shape[0] // config.patch, image_YXC.shape[1] // config.patch
        flat = patches(image_YXC, config.patch).to(self.form.dtype)
        x_ND = self.norm(functional.linear(flat, self.patch_map))
        angles = self.angles(rows, columns)
        for layer in self.layers:
            x_ND = layer(x_ND, angles)
        return x_ND, rows, columns

    def angles(self, rows: int, columns: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines of all patches, [N, H]: pairs of even number turn with the row, others with the column."""
        H, device = self.config.width // self.config.num_heads, self.form.device
        frequencies = 1.0 / self.config.theta ** (torch.arange(0, H, 2, dtype=torch.float32, device=device) / H)
        row, column = places(rows, columns, 1, device).float()
        half = torch.cat([row[:, None] * frequencies[0::2], column[:, None] * frequencies[1::2]], dim=-1)
        whole = torch.cat([half, half], dim=-1)
        return whole.cos(), whole.sin()


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

    @staticmethod
    def own_name(name: str) -> str:
        """The name in Mistral Small 3."""
        name = name.replace("vision_projection.", "multi_modal_projector.")
        return name.replace("vision_encoder.", "vision_tower.")
