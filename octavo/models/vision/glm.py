"""The vision tower of GLM-4.1V, GLM-4.5V, GLM-4.6V (arXiv 2507.01006) and GLM-OCR: Qwen2.5-VL's without windows.

Learned positions are added, which are sampled from a square grid for images of other sides; GLM-OCR has none. A
convolution makes one row of four patches, and gates follow.

Shapes: N patches, D width of the tower.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from octavo.models.config_keys import ConfigKeys
from octavo.models.loader import WeightLoader
from octavo.models.vision.qwen import QwenConfig, QwenTower, read_qwen
from octavo.models.vision.tower import Pixels
from octavo.models.vision.tower_parts import Affine, GatedFeedforward, LayerNorm, RMSNorm, part, places


def read_glm(keys: ConfigKeys, inner: ConfigKeys, **fields: Any) -> QwenConfig:
    """Read the keys that all these towers have; ``fields`` are the others."""
    return read_qwen(keys, inner, "silu", eps=inner.number("rms_norm_eps", 1e-5), is_gated=True, **fields)


class Glm4vTower(QwenTower):
    """See the module's docstring."""

    has_patch_bias = True

    @classmethod
    def read_config(cls, keys: ConfigKeys) -> QwenConfig:
        inner = part(keys, "vision_config")
        return read_glm(
            keys,
            inner,
            ffn_size=inner.size("out_hidden_size"),
            merger_size=inner.size("intermediate_size"),
            num_places=(inner.size("image_size", 336) // inner.size("patch_size", 14)) ** 2,
            has_bias=False,
            has_qkv_bias=inner.flag("attention_bias"),
        )

    def __init__(self, config: QwenConfig, weights: WeightLoader) -> None:
        super().__init__(config, weights)
        D, wide, m = config.width, config.hidden_size, config.merge
        if config.num_places:
            self.patch_norm = RMSNorm(weights, "visual.post_conv_layernorm", D, config.eps)
            self.place_table = weights.dense("visual.embeddings.position_embedding.weight", config.num_places, D)
        self.norm = RMSNorm(weights, "visual.post_layernorm", D, config.eps)
        self.merge_map = weights.dense("visual.downsample.weight", wide, D, m, m).permute(0, 2, 3, 1).reshape(wide, -1)
        self.merge_bias = weights.dense("visual.downsample.bias", wide)
        self.proj = Affine(weights, "visual.merger.proj", (wide, wide), has_bias=False)
        self.merger_norm = LayerNorm(weights, "visual.merger.post_projection_norm", wide, 1e-5)
        sizes = wide, config.merger_size
        self.merger = GatedFeedforward(weights, "visual.merger", sizes, config.activation, has_bias=False)

    def __call__(self, image: Pixels) -> Tensor:
        """The embeddings of an image, row by row: [N / merge^2, D of the decoder]."""
        x_ND, rows, columns = self.embedded(image)
        if self.config.num_places:
            x_ND = self.patch_norm(x_ND)
            x_ND = x_ND + self.learned(rows, columns).to(x_ND.dtype)
        angles = self.angles(rows, columns)
        for block in self.blocks:
            x_ND = block(x_ND, angles)
        merged = self.norm(x_ND).view(len(x_ND) // self.config.merge**2, -1)
        merged = functional.linear(merged, self.merge_map, self.merge_bias)
        return self.merger(functional.gelu(self.merger_norm(self.proj(merged))))

    def learned(self, rows: int, columns: int) -> Tensor:
        """The learned positions of a grid of other sides, interpolated by cubes between the middles: [N, D]."""
        side = round(self.config.num_places**0.5)
        row, column = places(rows, columns, self.config.merge, self.form.device).float()
        at = torch.stack([(column + 0.5) / columns, (row + 0.5) / rows], dim=-1) * 2 - 1
        table = self.place_table.float().view(1, side, side, -1).permute(0, 3, 1, 2)
        found = functional.grid_sample(table, at[None, :, None], "bicubic", "border", align_corners=False)
        return found[0, :, :, 0].t()


class GlmOcrTower(Glm4vTower):
    """The tower of GLM-OCR."""

    @classmethod
    def read_config(cls, keys: ConfigKeys) -> QwenConfig:
        inner = part(keys, "vision_config")
        has_bias = inner.flag("attention_bias", True)
        size = 3 * inner.size("out_hidden_size")
        return read_glm(keys, inner, merger_size=size, has_bias=has_bias, has_qkv_bias=has_bias, norms_heads=True)
