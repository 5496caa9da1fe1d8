"""LLaVA 1.5 (arXiv 2310.03744), LLaVA-NeXT (1.6) and LLaVA-OneVision (arXiv 2408.03326): CLIP or SigLIP, and two maps.

LLaVA 1.5 takes the middle of an image. The others take the entire image and tiles of it; rows of embeddings that are
padding are left out, and a learned embedding ends the others. Granite Vision (arXiv 2502.09927) is a LLaVA-NeXT with
SigLIP that joins the outputs of several layers.

Shapes: B tiles, N patches of a tile, D model.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from octavo.models.config_keys import ConfigKeys, wrong
from octavo.models.loader import WeightLoader
from octavo.models.vision.siglip import Siglip, SiglipConfig, read_siglip, tower_prefix
from octavo.models.vision.tower import Pixels, VisionConfig
from octavo.models.vision.tower_parts import ACTIVATIONS, Activation, Feedforward, normalised, part


@dataclass(frozen=True, kw_only=True)
class LlavaConfig(VisionConfig):
    siglip: SiglipConfig
    activation: Activation
    has_bias: bool
    scale: float
    """By which Granite multiplies embeddings, and what its decoder here has in place of the residuals' factor."""


class LlavaTower:
    """The tower of LLaVA 1.5."""

    layer = -2
    """The default layer whose output is used."""

    @classmethod
    def read_config(cls, keys: ConfigKeys) -> LlavaConfig:
        inner, text = part(keys, "vision_config"), part(keys, "text_config")
        kind = inner.get("model_type", "clip_vision_model")
        if kind not in ("clip_vision_model", "siglip_vision_model"):
            raise wrong("vision_config.model_type", kind, "clip_vision_model or siglip_vision_model")
        is_clip = kind == "clip_vision_model"
        siglip = read_siglip(inner, "quick_gelu" if is_clip else "gelu_pytorch_tanh")
        layer, strategy = keys.get("vision_feature_layer", cls.layer), keys.get("vision_feature_select_strategy")
        layers = layer if isinstance(layer, list) and layer else [layer]
        if not all(type(number) is int and -siglip.depth - 1 <= number <= siglip.depth for number in layers):
            raise wrong("vision_feature_layer", layer, f"numbers of layers up to {siglip.depth}")
        layers = [number if number >= 0 else siglip.depth + 1 + number for number in layers]
        if strategy not in (None, "default" if is_clip else "full"):
            raise wrong("vision_feature_select_strategy", strategy, "default" if is_clip else "full")
        taken = {"depth": max(layers), "outputs": tuple(layers) if len(layers) > 1 else ()}
        eps = inner.number("layer_norm_eps", 1e-5 if is_clip else 1e-6)
        return LlavaConfig(
            hidden_size=text.size("hidden_size", 4096),
            siglip=dataclasses.replace(siglip, **taken, eps=eps, is_clip=is_clip, has_last_norm=False),
            activation=keys.choice("projector_hidden_act", ACTIVATIONS, "gelu"),
            has_bias=keys.flag("multimodal_projector_bias", True),
            scale=text.number("embedding_multiplier", 1.0) / text.number("residual_multiplier", 1.0),
        )

    def __init__(self, config: LlavaConfig, weights: WeightLoader) -> None:
        self.config = config
        D, wide, name = config.siglip.width, config.hidden_size, "multi_modal_projector"
        D *= len(config.siglip.outputs) or 1
        self.siglip = Siglip(config.siglip, weights, tower_prefix(weights))
        names = f"{name}.linear_1", f"{name}.linear_2"
        self.map = Feedforward(weights, names, (D, wide, wide), config.activation, config.has_bias)

    def __call__(self, image: Pixels) -> Tensor:
        """The embeddings of an image, row by row."""
        return self.tiles(image).flatten(0, 1)

    def tiles(self, image: Pixels) -> Tensor:
        """The embeddings of each tile: [B, N, D]."""
        x_BND = self.siglip(normalised(image.pixels, image.mean, image.deviation))
        return self.map(x_BND) * self.config.scale


class LlavaNextTower(LlavaTower):
    """The tower of LLaVA-NeXT."""

    def __init__(self, config: LlavaConfig, weights: WeightLoader) -> None:
        super().__init__(config, weights)
        self.line_end = weights.dense("image_newline", config.hidden_size) * config.scale

    def __call__(self, image: Pixels) -> Tensor:
        """The embeddings of the entire image, then those of its tiles, row by row over all of them."""
        whole, *tiles = self.tiles(image)
        rows, columns, kept_rows, kept_columns, new_rows, new_columns = image.details
        cells = self.config.siglip.side
        grid_YXD = torch.stack(tiles).view(rows, columns, cells, cells, -1).transpose(1, 2).flatten(2, 3).flatten(0, 1)
        top, left = (len(grid_YXD) - kept_rows) // 2, (grid_YXD.shape[1] - kept_columns) // 2
        grid_YXD = grid_YXD[top : top + kept_rows, left : left + kept_columns]
        if (new_rows, new_columns) != (kept_rows, kept_columns):
            images = grid_YXD.permute(2, 0, 1)[None]
            grid_YXD = functional.interpolate(images, [new_rows, new_columns], mode="bilinear")[0].permute(1, 2, 0)
        ends = self.line_end.expand(len(grid_YXD), 1, -1)
        return torch.cat([whole, torch.cat([grid_YXD, ends], dim=1).flatten(0, 1)])


class LlavaOnevisionTower(LlavaNextTower):
    """The tower of LLaVA-OneVision, also for frames of videos, of which it keeps a quarter of the embeddings."""

    layer = -1

    def __call__(self, image: Pixels) -> Tensor:
        """As for LLaVA-NeXT; of a frame row by row, and the learned embedding behind the last one."""
        if len(image.details) != 1:
            return super().__call__(image)
        cells = self.config.siglip.side
        grid = self.tiles(image).view(1, cells, cells, -1).permute(0, 3, 1, 2)
        halved = functional.interpolate(grid, [-(-cells // 2)] * 2, mode="bilinear")[0].flatten(1).t()
        return torch.cat([halved, self.line_end.expand(image.details[0], -1)])
