"""SigLIP for images of any size, as SigLIP 2 has it (arXiv 2502.14786): the towers of LFM2-VL and PaddleOCR-VL.

Learned positions of a square grid are interpolated to an image's rows and columns of patches. In PaddleOCR-VL (arXiv
2510.14528) rows and columns rotate queries and keys as well. Two maps make one embedding of four patches.

Shapes: N patches, D width of the tower, P side of a patch.
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
from octavo.models.vision.siglip import SiglipConfig, SiglipLayer, read_siglip, tower_prefix
from octavo.models.vision.tower import Pixels, VisionConfig, read_axes
from octavo.models.vision.tower_parts import (
    ACTIVATIONS,
    Activation,
    Feedforward,
    LayerNorm,
    axial_angles,
    colours_first,
    normalised,
    part,
    patches,
    places,
    unpacked,
)


@dataclass(frozen=True, kw_only=True)
class NaflexConfig(VisionConfig):
    siglip: SiglipConfig
    merge: int


class Naflex:
    """The encoder."""

    def __init__(self, config: SiglipConfig, weights: WeightLoader, prefix: str, is_rotary: bool) -> None:
        """``is_rotary``: as in PaddleOCR-VL, whose patches go through a convolution, and whose positions are
        interpolated without smoothing."""
        D, P, name = config.width, config.patch, f"{prefix}.embeddings"
        self.config, self.form, self.is_rotary = config, weights.form, is_rotary
        if is_rotary:
            self.patch_map = weights.dense(f"{name}.patch_embedding.weight", D, 3, P, P).reshape(D, -1)
        else:
            self.patch_map = colours_first(weights.dense(f"{name}.patch_embedding.weight", D, P * P * 3), P)
        self.patch_bias = weights.dense(f"{name}.patch_embedding.bias", D)
        self.places = weights.dense(f"{name}.position_embedding.weight", config.side**2, D)
        self.layers = [SiglipLayer(config, weights, f"{prefix}.encoder.layers.{i}") for i in range(config.depth)]
        self.norm = LayerNorm(weights, f"{prefix}.post_layernorm", D, config.eps)

    def __call__(self, image_YXC: Tensor, merge: int) -> Tensor:
        """The last layer's output for a normalised image, [N, D], in windows of ``merge`` x ``merge`` patches."""
        config, side = self.config, self.config.side
        rows, columns = image_YXC.shape[0] // config.patch, image_YXC.shape[1] // config.patch
        flat = patches(image_YXC, config.patch, merge).to(self.form.dtype)
        at = places(rows, columns, merge, self.form.device)
        table = self.places.float().t().reshape(1, -1, side, side)
        found = functional.interpolate(table, [rows, columns], mode="bilinear", antialias=not self.is_rotary)
        x_ND = functional.linear(flat, self.patch_map, self.patch_bias)
        x_ND = x_ND + found[0, :, at[0], at[1]].t().to(x_ND.dtype)
        angles = axial_angles(at, config.width // config.num_heads) if self.is_rotary else None
        for layer in self.layers:
            x_ND = layer(x_ND, angles)
        return self.norm(x_ND)


class PaddleOCRTower:
    """The tower of PaddleOCR-VL."""

    @classmethod
    def read_config(cls, keys: ConfigKeys) -> NaflexConfig:
        inner = part(keys, "vision_config")
        text = part(keys, "text_config") if keys.get("text_config") else keys
        siglip = read_siglip(inner, num_heads=16, patch=14, image=384)
        if siglip.width % (size := 4 * siglip.num_heads):
            raise wrong("vision_config.hidden_size", siglip.width, f"a multiple of {size}, four times the heads")
        return NaflexConfig(
            hidden_size=text.size("hidden_size", 1024),
            axes=read_axes(text),
            siglip=siglip,
            merge=inner.size("spatial_merge_size", 2),
        )

    own_names: ClassVar = {"mlp_AR.": "projector."}

    def __init__(self, config: NaflexConfig, weights: WeightLoader) -> None:
        self.config, inner = config, config.siglip.width * config.merge**2
        self.encoder = Naflex(config.siglip, weights, "visual.vision_model", is_rotary=True)
        self.norm = LayerNorm(weights, "projector.pre_norm", config.siglip.width, 1e-5)
        names = "projector.linear_1", "projector.linear_2"
        self.map = Feedforward(weights, names, (inner, inner, config.hidden_size), ACTIVATIONS["gelu"])

    def __call__(self, image: Pixels) -> Tensor:
        """The embeddings of an image, row by row: [N / merge^2, D of the decoder]."""
        m = self.config.merge
        x_ND = self.norm(self.encoder(normalised(image.pixels[0], image.mean, image.deviation), m))
        return self.map(x_ND.view(len(x_ND) // m**2, -1))


@dataclass(frozen=True, kw_only=True)
class LfmConfig(NaflexConfig):
    projector_size: int
    has_projector_norm: bool
    has_projector_bias: bool
    activation: Activation


class LfmTower:
    """The tower of LFM2-VL (arXiv 2511.23404): tiles of one size, and the entire image in its own ratio."""

    @classmethod
    def read_config(cls, keys: ConfigKeys) -> LfmConfig:
        inner = part(keys, "vision_config")
        count, patch = inner.size("num_patches", 256), inner.size("patch_size", 16)
        side = round(count**0.5)
        if side**2 != count:
            raise wrong("vision_config.num_patches", count, "a square")
        return LfmConfig(
            hidden_size=part(keys, "text_config").size("hidden_size", 2560),
            siglip=dataclasses.replace(read_siglip(inner), image=side * patch),
            merge=keys.size("downsample_factor", 2),
            projector_size=keys.size("projector_hidden_size", 2560),
            has_projector_norm=keys.flag("projector_use_layernorm", True),
            has_projector_bias=keys.flag("projector_bias", True),
            activation=keys.choice("projector_hidden_act", ACTIVATIONS, "gelu"),
        )

    def __init__(self, config: LfmConfig, weights: WeightLoader) -> None:
        self.config, name = config, "multi_modal_projector"
        self.encoder = Naflex(config.siglip, weights, tower_prefix(weights), is_rotary=False)
        inner, wide, has_bias = config.siglip.width * config.merge**2, config.projector_size, config.has_projector_bias
        self.norm = LayerNorm(weights, f"{name}.layer_norm", inner, 1e-5) if config.has_projector_norm else None
        names, sizes = (f"{name}.linear_1", f"{name}.linear_2"), (inner, wide, config.hidden_size)
        self.map = Feedforward(weights, names, sizes, config.activation, has_bias)

    def __call__(self, image: Pixels) -> Tensor:
        """The embeddings of the tiles, then those of the entire image, each row by row."""
        m, found = self.config.merge, list[Tensor]()
        for tile in unpacked(image):
            x_ND = self.encoder(normalised(tile, image.mean, image.deviation), m)
            found.append(x_ND.view(len(x_ND) // m**2, -1))
        x_ND = torch.cat(found)
        return self.map(x_ND if self.norm is None else self.norm(x_ND))
