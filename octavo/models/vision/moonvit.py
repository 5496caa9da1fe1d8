"""MoonViT, the vision tower of Kimi-VL (arXiv 2504.07491) and Kimi K2.5.

Images of any size in patches. Learned positions of a square grid are interpolated by cubes, and rows and columns rotate
queries and keys in turns: of two neighbouring pairs of a head, the first rotates by the column. Two maps make one
embedding of four patches. In Kimi K2.5 the patches of some frames of a video attend to each other, with sines of their
time added, and have one embedding, of their mean.

Shapes: F frames, N patches of each, D width of the tower, H head dim.
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
    attend,
    in_halves,
    normalised,
    part,
    patches,
    places,
    turn,
    whole_numbers,
)
from octavo.models.vision.tower import Pixels, VisionConfig

THETA = 10_000.0


@dataclass(frozen=True, kw_only=True)
class MoonConfig(VisionConfig):
    depth: int
    width: int
    ffn_size: int
    num_heads: int
    patch: int
    merge: int
    num_places: tuple[int, int]
    """Rows and columns of the learned positions."""


class MoonLayer:
    """Attention and feed-forward layer."""

    def __init__(self, config: MoonConfig, weights: WeightLoader, prefix: str) -> None:
        D = config.width
        self.num_heads = config.num_heads
        self.norms = [LayerNorm(weights, f"{prefix}.norm{i}", D, 1e-5) for i in (0, 1)]
        self.qkv = Affine(weights, f"{prefix}.wqkv", (3 * D, D))
        for stored in (self.qkv.weight, self.qkv.bias):
            assert stored is not None
            for rows in (stored[:D], stored[D : 2 * D]):
                rows.copy_(in_halves(rows, config.num_heads))
        self.out = Affine(weights, f"{prefix}.wo", (D, D))
        names = f"{prefix}.mlp.fc0", f"{prefix}.mlp.fc1"
        self.mlp = Feedforward(weights, names, (D, config.ffn_size, D), ACTIVATIONS["gelu_pytorch_tanh"])

    def __call__(self, x_ND: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        q, k, v = self.qkv(self.norms[0](x_ND)).view(len(x_ND), 3, self.num_heads, -1).unbind(1)
        x_ND = x_ND + self.out(attend(turn(q, *angles), turn(k, *angles), v))
        return x_ND + self.mlp(self.norms[1](x_ND))


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
            num_places=(place("height"), place("width")),
        )

    @staticmethod
    def own_name(name: str) -> str:
        """The name in Kimi K2.5's checkpoints."""
        name = name.replace("multi_modal_projector.linear_1.", "mm_projector.proj.0.")
        name = name.replace("multi_modal_projector.linear_2.", "mm_projector.proj.2.")
        return name.replace("multi_modal_projector.", "mm_projector.")

    def __init__(self, config: MoonConfig, weights: WeightLoader) -> None:
        self.config, self.form = config, weights.form
        D, P, name = config.width, config.patch, "vision_tower.patch_embed"
        self.patch_map = weights.dense(f"{name}.proj.weight", D, 3, P, P).reshape(D, -1)
        self.patch_bias = weights.dense(f"{name}.proj.bias", D)
        self.places = weights.dense(f"{name}.pos_emb.weight", *config.num_places, D)
        prefix = "vision_tower.encoder"
        self.layers = [MoonLayer(config, weights, f"{prefix}.blocks.{i}") for i in range(config.depth)]
        self.norm = LayerNorm(weights, f"{prefix}.final_layernorm", D, 1e-5)
        self.merger_norm = LayerNorm(weights, "mm_projector.pre_norm", D, 1e-5)
        inner, names = D * config.merge**2, ("mm_projector.proj.0", "mm_projector.proj.2")
        self.merger = Feedforward(weights, names, (inner, inner, config.hidden_size), ACTIVATIONS["gelu"])

    def __call__(self, image: Pixels) -> Tensor:
        """The embeddings of an image or of some frames, row by row: [N / merge^2, D of the decoder]."""
        m = self.config.merge
        tiles = normalised(image.pixels, image.mean, image.deviation)
        F, rows, columns = len(tiles), *(side // self.config.patch for side in tiles.shape[1:3])
        flat = torch.stack([patches(tile, self.config.patch, m) for tile in tiles]).to(self.form.dtype)
        row, column = places(rows, columns, m, self.form.device)
        learned = functional.interpolate(self.places.float().permute(2, 0, 1)[None], [rows, columns], mode="bicubic")
        added_FND = learned[0, :, row, column].t() + (self.times(F)[:, None] if F > 1 else 0)
        x_FND = functional.linear(flat, self.patch_map, self.patch_bias)
        x_ND = (x_FND + added_FND.to(x_FND.dtype)).flatten(0, 1)
        angles = self.angles(row.repeat(F), column.repeat(F))
        for layer in self.layers:
            x_ND = layer(x_ND, angles)
        x_ND = self.norm(x_ND).view(F, -1, self.config.width).mean(0)
        return self.merger(self.merger_norm(x_ND).view(len(x_ND) // m**2, -1))

    def times(self, count: int) -> Tensor:
        """What is added to the patches of each frame: [F, D]."""
        D, device = self.config.width, self.form.device
        powers = torch.arange(0, D, 2, dtype=torch.float32, device=device) / D
        turns = torch.arange(count, dtype=torch.float32, device=device)[:, None] / THETA**powers
        return torch.cat([turns.sin(), turns.cos()], dim=-1)

    def angles(self, row: Tensor, column: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines of all patches, [N, H]."""
        H = self.config.width // self.config.num_heads
        powers = torch.arange(0, H, 4, dtype=torch.float32, device=row.device) / H
        turns = torch.stack([column, row], dim=-1).float()[:, None] / THETA ** powers[:, None]
        half = turns.flatten(1)
        whole = torch.cat([half, half], dim=-1)
        return whole.cos(), whole.sin()
