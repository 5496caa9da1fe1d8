"""MoonViT, the vision tower of Kimi-VL (arXiv 2504.07491) and Kimi K2.5.

Images of any size in patches. Learned positions of a square grid are interpolated by cubes, and rows and columns rotate
queries and keys in turns: of two neighbouring pairs of a head, the first rotates by the column. Two maps make one
embedding of four patches. In Kimi K2.5 the patches of some frames of a video attend to each other, with sines of their
time added, and have one embedding, of their mean.

Shapes: F frames, N patches of each, D width of the tower, R rotated pairs of a head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from octavo.models.config_keys import ConfigKeys, wrong
from octavo.models.loader import WeightLoader
from octavo.models.vision.qwen import QwenBlock, QwenConfig
from octavo.models.vision.tower import Pixels
from octavo.models.vision.tower_parts import (
    ACTIVATIONS,
    Feedforward,
    LayerNorm,
    PatchMap,
    in_halves,
    normalised,
    part,
    places,
    turns,
    whole_numbers,
)


@dataclass(frozen=True, kw_only=True)
class MoonConfig(QwenConfig):
    grid: tuple[int, int]
    """Rows and columns of the learned positions."""


class MoonTower:
    """See the module's docstring."""

    @classmethod
    def read_config(cls, keys: ConfigKeys) -> MoonConfig:
        inner = part(keys, "vision_config")
        merge = whole_numbers(inner, "merge_kernel_size", (2, 2), low=1)
        if len(merge) != 2 or merge[0] != merge[1]:
            raise wrong("merge_kernel_size", merge, "the sides of a square")

        def size(name: str, default: int) -> int:
            """Kimi K2.5 has another name for it."""
            return inner.size(f"vt_{name}", inner.size(name, default))

        def place(name: str) -> int:
            return inner.size(f"init_pos_emb_{name}", inner.size(f"pos_emb_{name}", 64))

        return MoonConfig(
            hidden_size=part(keys, "text_config").size("hidden_size"),
            depth=size("num_hidden_layers", 27),
            width=size("hidden_size", 1152),
            ffn_size=size("intermediate_size", 4304),
            num_heads=size("num_attention_heads", 16),
            patch=inner.size("patch_size", 14),
            merge=merge[0],
            activation=ACTIVATIONS["gelu_pytorch_tanh"],
            ups=("fc0", "fc1"),
            eps=1e-5,
            grid=(place("height"), place("width")),
        )

    own_names: ClassVar = {
        "multi_modal_projector.linear_1.": "mm_projector.proj.0.",
        "multi_modal_projector.linear_2.": "mm_projector.proj.2.",
        "multi_modal_projector.": "mm_projector.",
        ".norm1.": ".norm2.",
        ".norm0.": ".norm1.",
        ".wqkv.": ".attn.qkv.",
        ".wo.": ".attn.proj.",
    }
    """Parts of weights' names, and what Kimi K2.5's checkpoints have, or Qwen's blocks, in their place."""

    def __init__(self, config: MoonConfig, weights: WeightLoader) -> None:
        self.config, self.form = config, weights.form
        D, name = config.width, "vision_tower.patch_embed"
        self.patch_map = PatchMap(weights, f"{name}.proj", D, config.patch)
        self.places = weights.dense(f"{name}.pos_emb.weight", *config.grid, D)
        prefix = "vision_tower.encoder"
        self.layers = [QwenBlock(config, weights, f"{prefix}.blocks.{i}") for i in range(config.depth)]
        for layer in self.layers:
            for stored in (layer.qkv.weight, layer.qkv.bias):
                assert stored is not None
                for rows in (stored[:D], stored[D : 2 * D]):
                    rows.copy_(in_halves(rows, config.num_heads))
        self.norm = LayerNorm(weights, f"{prefix}.final_layernorm", D, 1e-5)
        self.merger_norm = LayerNorm(weights, "mm_projector.pre_norm", D, 1e-5)
        inner, names = D * config.merge**2, ("mm_projector.proj.0", "mm_projector.proj.2")
        self.merger = Feedforward(weights, names, (inner, inner, config.hidden_size), ACTIVATIONS["gelu"])

    def __call__(self, image: Pixels) -> Tensor:
        """The embeddings of an image or of some frames, row by row: [N / merge^2, D of the decoder]."""
        m = self.config.merge
        tiles = normalised(image.pixels, image.mean, image.deviation)
        F, rows, columns = len(tiles), *(side // self.config.patch for side in tiles.shape[1:3])
        row, column = places(rows, columns, m, self.form.device)
        learned = functional.interpolate(self.places.float().permute(2, 0, 1)[None], [rows, columns], mode="bicubic")
        added_FND = learned[0, :, row, column].t() + (self.times(F)[:, None] if F > 1 else 0)
        x_FND = self.patch_map(tiles, m)
        x_ND = (x_FND + added_FND.to(x_FND.dtype)).flatten(0, 1)
        angles = self.angles(row.repeat(F), column.repeat(F))
        for layer in self.layers:
            x_ND = layer(x_ND, angles)
        x_ND = self.norm(x_ND).view(F, -1, self.config.width).mean(0)
        return self.merger(self.merger_norm(x_ND).view(len(x_ND) // m**2, -1))

    def times(self, count: int) -> Tensor:
        """What is added to the patches of each frame: [F, D]."""
        angles = turns(torch.arange(count, device=self.form.device), self.config.width)
        return torch.cat([angles.sin(), angles.cos()], dim=-1)

    def angles(self, row: Tensor, column: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines of all patches, [N, R]."""
        H = self.config.width // self.config.num_heads
        angles = torch.stack([turns(place, H, every=4) for place in (column, row)], dim=-1).flatten(1)
        return angles.cos(), angles.sin()
