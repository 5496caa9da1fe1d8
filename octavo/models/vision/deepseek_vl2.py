"""The vision tower of DeepSeek-VL2 (arXiv 2412.10302): SigLIP, and two maps of windows of patches.

An image is padded to one of some sizes; the tower takes it whole, brought to a tile, and tile by tile. A learned
embedding ends each row of embeddings, and another one stands between the whole image and its tiles.

Shapes: N patches of a tile, D width of the tower.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from octavo.models.config_keys import ConfigKeys, wrong
from octavo.models.loader import WeightLoader
from octavo.models.vision.qwen import QwenBlock, QwenConfig
from octavo.models.vision.tower import Pixels, VisionConfig
from octavo.models.vision.tower_parts import ACTIVATIONS, Feedforward, LayerNorm, PatchMap, normalised, part, read_ratio


@dataclass(frozen=True, kw_only=True)
class DeepseekVL2Config(VisionConfig):
    encoder: QwenConfig
    side: int
    """Patches in a row of a tile."""
    inner_size: int
    """Numbers between the two maps."""
    has_whole_first: bool


class DeepseekVL2Tower:
    """See the module's docstring."""

    @classmethod
    def read_config(cls, keys: ConfigKeys) -> DeepseekVL2Config:
        inner, projector = part(keys, "vision_config"), part(keys, "projector_config")
        projector.choice("projector_type", {"downsample_mlp_gelu": None}, "downsample_mlp_gelu")
        keys.choice("tile_tag", {"2D": None}, "2D")
        if projector.size("depth", 2) != 2:
            raise wrong("projector_config.depth", projector.get("depth"), "2")
        width, wide = inner.size("width", 1152), projector.size("n_embed", 2048)
        encoder = QwenConfig(
            hidden_size=wide,
            depth=inner.size("layers", 27),
            width=width,
            ffn_size=int(width * read_ratio(inner, "mlp_ratio", 3.7362)),
            num_heads=inner.size("heads", 16),
            patch=inner.size("patch_size", 14),
            merge=projector.size("downsample_ratio", 2),
            activation=ACTIVATIONS["gelu_pytorch_tanh"],
            ups=("fc1", "fc2"),
        )
        return DeepseekVL2Config(
            hidden_size=wide,
            encoder=encoder,
            side=inner.size("image_size", 384) // encoder.patch,
            inner_size=wide * projector.size("mlp_ratio", 1),
            has_whole_first=keys.choice("global_view_pos", {"head": True, "tail": False}, "head"),
        )

    def __init__(self, config: DeepseekVL2Config, weights: WeightLoader) -> None:
        self.config, encoder = config, config.encoder
        D, m, wide = encoder.width, encoder.merge, config.hidden_size
        self.patch_map = PatchMap(weights, "vision.patch_embed.proj", D, encoder.patch)
        self.places = weights.dense("vision.pos_embed", 1, config.side**2, D)[0]
        self.blocks = [QwenBlock(encoder, weights, f"vision.blocks.{i}") for i in range(encoder.depth)]
        self.norm = LayerNorm(weights, "vision.norm", D, encoder.eps)
        names, sizes = ("projector.layers.0", "projector.layers.2"), (D * m**2, config.inner_size, wide)
        self.map = Feedforward(weights, names, sizes, ACTIVATIONS["gelu"])
        stored = self.map.up.weight  # whose inputs are number by number of the patches
        stored.copy_(stored.view(-1, D, m**2).transpose(1, 2).reshape(stored.shape))
        self.line_end = weights.dense("image_newline", wide)
        self.separator = weights.dense("view_seperator", wide)

    def __call__(self, image: Pixels) -> Tensor:
        """The embeddings of the whole image and of its tiles, row by row over all of them."""
        rows, columns = image.details
        whole, *tiles = (self.tile(pixels) for pixels in normalised(image.pixels, image.mean, image.deviation))
        cells = whole.shape[0]
        grid = torch.stack(tiles).view(rows, columns, cells, cells, -1).transpose(1, 2)
        views = [self.lines(whole), self.lines(grid.reshape(rows * cells, columns * cells, -1))]
        first, second = views if self.config.has_whole_first else reversed(views)
        return torch.cat([first, self.separator[None], second])

    def lines(self, grid_YXD: Tensor) -> Tensor:
        """The rows of a grid one after the other, each with the embedding that ends it."""
        return torch.cat([grid_YXD, self.line_end.expand(len(grid_YXD), 1, -1)], dim=1).flatten(0, 1)

    def tile(self, tile_YXC: Tensor) -> Tensor:
        """The embeddings of a tile: [rows, columns, D of the decoder]."""
        side, encoder = self.config.side, self.config.encoder
        pixels, m = side * encoder.patch, encoder.merge
        x_ND = self.patch_map(tile_YXC[:pixels, :pixels]) + self.places
        for block in self.blocks:
            x_ND = block(x_ND, None)
        grid = self.norm(x_ND).view(side, side, -1)
        more = -side % m  # a last row and column of zeros
        count = (side + more) // m
        windows = functional.pad(grid, (0, 0, 0, more, 0, more)).view(count, m, count, m, -1).transpose(1, 2)
        return self.map(windows.reshape(count, count, -1))
