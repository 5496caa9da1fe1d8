"""The encoder of SAM (arXiv 2304.02643), and the tower of GOT-OCR 2 (arXiv 2409.01704) around it.

Most layers attend within windows, which are filled up with zeros. Learned vectors of the distance in rows and in
columns give each query a bias for each key: here the biases are further numbers of the query, and keys say their row
and column in theirs. Convolutions make one embedding of sixteen patches.

Shapes: B tiles, Y X rows and columns of patches, D width, A heads, H head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from octavo.models.config_keys import ConfigKeys
from octavo.models.loader import WeightLoader
from octavo.models.vision.tower import Pixels, VisionConfig
from octavo.models.vision.tower_parts import (
    ACTIVATIONS,
    Activation,
    Affine,
    Feedforward,
    LayerNorm,
    PatchMap,
    attend,
    normalised,
    part,
    read_ratio,
    whole_numbers,
)


@dataclass(frozen=True)
class SamConfig:
    depth: int
    width: int
    ffn_size: int
    num_heads: int
    patch: int
    side: int
    """Patches in a row of the images of which positions were learned."""
    window: int
    full_layers: tuple[int, ...]
    """Layers without windows."""
    output_size: int
    eps: float
    activation: Activation
    has_qkv_bias: bool
    has_places: bool
    has_distances: bool


def read_sam(keys: ConfigKeys) -> SamConfig:
    """Read the configuration. Raises ``CheckpointError``."""
    width = keys.size("hidden_size", 768)
    patch = keys.size("patch_size", 16)
    return SamConfig(
        depth=keys.size("num_hidden_layers", 12),
        width=width,
        ffn_size=keys.size("mlp_dim", int(width * read_ratio(keys, "mlp_ratio", 4.0))),
        num_heads=keys.size("num_attention_heads", 12),
        patch=patch,
        side=keys.size("image_size", 1024) // patch,
        window=keys.size("window_size", 14),
        full_layers=whole_numbers(keys, "global_attn_indexes", (2, 5, 8, 11)),
        output_size=keys.size("output_channels", 256),
        eps=keys.number("layer_norm_eps", 1e-6),
        activation=keys.choice("hidden_act", ACTIVATIONS, "gelu"),
        has_qkv_bias=keys.flag("qkv_bias", True),
        has_places=keys.flag("use_abs_pos", True),
        has_distances=keys.flag("use_rel_pos", True),
    )


class SamLayer:
    """Attention and feed-forward layer."""

    def __init__(self, config: SamConfig, weights: WeightLoader, prefix: str, window: int) -> None:
        """``window``: rows and columns of a window; 0 for none."""
        D, self.num_heads, self.window = config.width, config.num_heads, window
        self.norms = [LayerNorm(weights, f"{prefix}.norm{i}", D, config.eps) for i in (1, 2)]
        self.qkv = Affine(weights, f"{prefix}.attn.qkv", (3 * D, D), config.has_qkv_bias)
        self.out = Affine(weights, f"{prefix}.attn.proj", (D, D))
        names = f"{prefix}.mlp.lin1", f"{prefix}.mlp.lin2"
        self.mlp = Feedforward(weights, names, (D, config.ffn_size, D), config.activation)
        axes = "hw" if config.has_distances else ""
        size = 2 * (window or config.side) - 1, D // config.num_heads
        self.distances = [weights.dense(f"{prefix}.attn.rel_pos_{axis}", *size) for axis in axes]

    def __call__(self, x_BYXD: Tensor) -> Tensor:
        _, Y, X, D = x_BYXD.shape
        inner = self.norms[0](x_BYXD)
        if self.window:
            w = self.window
            inner = functional.pad(inner, (0, 0, 0, -X % w, 0, -Y % w))
            _, rows, columns, _ = inner.shape
            inner = inner.view(-1, rows // w, w, columns // w, w, D).transpose(2, 3).reshape(-1, w, w, D)
        inner = self.out(self.attended(inner))
        if self.window:
            inner = inner.view(-1, rows // w, columns // w, w, w, D).transpose(2, 3)
            inner = inner.reshape(-1, rows, columns, D)[:, :Y, :X]
        x_BYXD = x_BYXD + inner
        return x_BYXD + self.mlp(self.norms[1](x_BYXD))

    def attended(self, x_BYXD: Tensor) -> Tensor:
        """Attention of all patches of a tile or a window to each other."""
        B, Y, X, D = x_BYXD.shape
        q, k, v = self.qkv(x_BYXD).view(B, Y, X, 3, self.num_heads, -1).unbind(3)
        H = q.shape[-1]
        if self.distances:
            tables = (self._table(self.distances[0], Y), self._table(self.distances[1], X))
            of_rows = torch.einsum("byxah,ykh->byxak", q, tables[0])
            of_columns = torch.einsum("byxah,xkh->byxak", q, tables[1])
            q = torch.cat([q, of_rows * H**0.5, of_columns * H**0.5], dim=-1)
            rows, columns = (torch.eye(count, dtype=k.dtype, device=k.device) for count in (Y, X))
            at = torch.cat([rows[:, None].expand(Y, X, Y), columns[None].expand(Y, X, X)], dim=-1)
            k = torch.cat([k, at[None, :, :, None].expand(B, Y, X, self.num_heads, -1)], dim=-1)
            v = functional.pad(v, (0, Y + X))
        q, k, v = (each.reshape(B, Y * X, self.num_heads, -1) for each in (q, k, v))
        found = attend(q, k, v, H**-0.5).view(B, Y, X, self.num_heads, -1)
        return found[..., :H].reshape(B, Y, X, D)

    @staticmethod
    def _table(distances: Tensor, count: int) -> Tensor:
        """The vectors of the distances from each place to each: [count, count, H]."""
        if len(distances) != 2 * count - 1:
            longer = functional.interpolate(distances.float().t()[None], 2 * count - 1, mode="linear")
            distances = longer[0].t().to(distances.dtype)
        places = torch.arange(count, device=distances.device)
        return distances[places[:, None] - places + count - 1]


class Sam:
    """The encoder."""

    def __init__(self, config: SamConfig, weights: WeightLoader, prefix: str) -> None:
        self.config, D, out = config, config.width, config.output_size
        self.patch_map = PatchMap(weights, f"{prefix}.patch_embed.projection", D, config.patch)
        size = 1, config.side, config.side, D
        self.places = weights.dense(f"{prefix}.pos_embed", *size)[0] if config.has_places else None
        windows = [0 if layer in config.full_layers else config.window for layer in range(config.depth)]
        self.layers = [SamLayer(config, weights, f"{prefix}.layers.{i}", window) for i, window in enumerate(windows)]
        self.neck_map = weights.dense(f"{prefix}.neck.conv1.weight", out, D, 1, 1).reshape(out, D)
        self.neck_kernel = weights.dense(f"{prefix}.neck.conv2.weight", out, out, 3, 3)
        self.neck_norms = [LayerNorm(weights, f"{prefix}.neck.norm{i}", out, 1e-6) for i in (1, 2)]

    def __call__(self, images_BYXC: Tensor) -> Tensor:
        """The output for normalised images, colours first: [B, output_size, Y, X]."""
        B, height, width, _ = images_BYXC.shape
        Y, X = height // self.config.patch, width // self.config.patch
        x_BYXD = self.patch_map(images_BYXC).view(B, Y, X, -1)
        if self.places is not None:
            x_BYXD = x_BYXD + resized(self.places, Y, X)
        for layer in self.layers:
            x_BYXD = layer(x_BYXD)
        x_BYXD = self.neck_norms[0](functional.linear(x_BYXD, self.neck_map))
        x_BCYX = functional.conv2d(x_BYXD.permute(0, 3, 1, 2), self.neck_kernel, padding=1)
        return self.neck_norms[1](x_BCYX.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class Halving:
    """Convolutions, each of which halves rows and columns."""

    def __init__(self, weights: WeightLoader, names: Sequence[str], sizes: Sequence[int]) -> None:
        """``sizes``: numbers of a place before the first one and behind each."""
        pairs = zip(names, sizes[1:], sizes, strict=False)
        self.kernels = [weights.dense(f"{name}.weight", after, before, 3, 3) for name, after, before in pairs]

    def __call__(self, x_BCYX: Tensor) -> Tensor:
        for kernel in self.kernels:
            x_BCYX = functional.conv2d(x_BCYX, kernel, stride=2, padding=1)
        return x_BCYX


def resized(grid_YXD: Tensor, rows: int, columns: int) -> Tensor:
    """Learned positions, interpolated where there are more or fewer: [rows, columns, D]."""
    if grid_YXD.shape[:2] == (rows, columns):
        return grid_YXD
    grid = grid_YXD.float().permute(2, 0, 1)[None]
    found = functional.interpolate(grid, (rows, columns), mode="bicubic", antialias=True)
    return found[0].permute(1, 2, 0).to(grid_YXD.dtype)


@dataclass(frozen=True, kw_only=True)
class GotConfig(VisionConfig):
    sam: SamConfig


class GotTower:
    """The tower of GOT-OCR 2."""

    own_names: ClassVar = {".layer_norm": ".norm"}

    @classmethod
    def read_config(cls, keys: ConfigKeys) -> GotConfig:
        hidden_size = part(keys, "text_config").size("hidden_size", 1024)
        return GotConfig(hidden_size=hidden_size, sam=read_sam(part(keys, "vision_config")))

    def __init__(self, config: GotConfig, weights: WeightLoader) -> None:
        C, wide, name = config.sam.output_size, config.hidden_size, "multi_modal_projector"
        self.sam = Sam(config.sam, weights, "vision_tower")
        names = [f"{name}.conv_upsampler{i}" for i in (1, 2)]
        self.halving = Halving(weights, names, (C, 2 * C, wide))
        self.map = Affine(weights, f"{name}.multimodal_projector", (wide, wide))

    def __call__(self, image: Pixels) -> Tensor:
        """The embeddings of an image, tile by tile."""
        x_BCYX = self.sam(normalised(image.pixels, image.mean, image.deviation))
        return self.map(self.halving(x_BCYX).flatten(2).transpose(1, 2)).flatten(0, 1)
