"""The vision tower of MiniCPM-V 4.6 (arXiv 2408.01800 has the slices): SigLIP for images of any size.

The learned position of a patch is that of the nearest place in a square grid. Behind one layer, the patches of each
window of 2 x 2 attend to each other and become one; two maps make one embedding of each four of those.

Shapes: N patches, D width of the tower.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.models.config_keys import ConfigKeys, wrong
from octavo.models.loader import WeightLoader
from octavo.models.vision.siglip import SiglipConfig, SiglipLayer, read_siglip, tower_prefix
from octavo.models.vision.tower import Pixels, VisionConfig
from octavo.models.vision.tower_parts import (
    ACTIVATIONS,
    Affine,
    Feedforward,
    LayerNorm,
    PatchMap,
    attend,
    normalised,
    part,
    places,
    unpacked,
    whole_numbers,
)


@dataclass(frozen=True, kw_only=True)
class MiniCPMConfig(VisionConfig):
    siglip: SiglipConfig
    merging_layer: int
    """The layer behind which windows become one patch; -1: none does."""
    num_maps: int
    """Times that four embeddings become one behind the layers."""


class WindowMerger:
    """Attention within windows, each of which becomes one patch."""

    def __init__(self, config: SiglipConfig, weights: WeightLoader, prefix: str) -> None:
        D, self.num_heads = config.width, config.num_heads
        self.qkv = [Affine(weights, f"{prefix}.self_attn.{name}_proj", (D, D)) for name in "qkv"]
        self.out = Affine(weights, f"{prefix}.self_attn.out_proj", (D, D))
        self.norm = LayerNorm(weights, f"{prefix}.layer_norm1", D, config.eps)
        self.merged_norm = LayerNorm(weights, f"{prefix}.pre_norm", 4 * D, config.eps)
        names = f"{prefix}.linear_1", f"{prefix}.linear_2"
        self.mlp = Feedforward(weights, names, (4 * D, 4 * config.ffn_size, D), ACTIVATIONS["gelu_pytorch_tanh"])

    def __call__(self, x_ND: Tensor) -> Tensor:
        """``x``: window by window."""
        windows = x_ND.view(-1, 4, x_ND.shape[1])
        inner = self.norm(windows)
        q, k, v = (affine(inner).view(*inner.shape[:-1], self.num_heads, -1) for affine in self.qkv)
        windows = windows + self.out(attend(q, k, v))
        return self.mlp(self.merged_norm(windows.flatten(1))) + windows.mean(1)


class MiniCPMTower:
    """See the module's docstring."""

    @classmethod
    def read_config(cls, keys: ConfigKeys) -> MiniCPMConfig:
        inner = part(keys, "vision_config")
        for name, values in (("merge_kernel_size", keys), ("window_kernel_size", inner)):
            if whole_numbers(values, name, (2, 2)) != (2, 2):
                raise wrong(name, values.get(name), "[2, 2]")
        siglip, layer = read_siglip(inner), keys.size("insert_layer_id", inner.size("insert_layer_id", 6, low=0), low=0)
        if layer >= siglip.depth:
            raise wrong("insert_layer_id", layer, f"less than {siglip.depth}, the number of layers")
        return MiniCPMConfig(
            hidden_size=part(keys, "text_config").size("hidden_size", 4096),
            siglip=siglip,
            merging_layer=layer if keys.choice("downsample_mode", {"16x": True, "4x": False}, "16x") else -1,
            num_maps=keys.size("merger_times", 1),
        )

    def __init__(self, config: MiniCPMConfig, weights: WeightLoader) -> None:
        self.config, self.form, siglip = config, weights.form, config.siglip
        D, prefix = siglip.width, tower_prefix(weights)
        self.patch_map = PatchMap(weights, f"{prefix}.embeddings.patch_embedding", D, siglip.patch)
        self.places = weights.dense(f"{prefix}.embeddings.position_embedding.weight", siglip.side**2, D)
        self.layers = [SiglipLayer(siglip, weights, f"{prefix}.encoder.layers.{i}") for i in range(siglip.depth)]
        self.norm = LayerNorm(weights, f"{prefix}.post_layernorm", D, siglip.eps)
        self.merger = WindowMerger(siglip, weights, f"{prefix}.vit_merger") if config.merging_layer >= 0 else None
        widths = [D] * (config.num_maps - 1) + [config.hidden_size]
        self.maps = []
        for i, width in enumerate(widths):
            norm = LayerNorm(weights, f"merger.mlp.{i}.pre_norm", 4 * D, 1e-6)
            names = f"merger.mlp.{i}.linear_1", f"merger.mlp.{i}.linear_2"
            self.maps.append((norm, Feedforward(weights, names, (4 * D, 4 * D, width), ACTIVATIONS["gelu"])))

    def __call__(self, image: Pixels) -> Tensor:
        """The embeddings of the entire image, then those of its slices, each row by row."""
        *slices, whole = unpacked(image)
        return torch.cat([self.slice(normalised(each, image.mean, image.deviation)) for each in (whole, *slices)])

    def slice(self, image_YXC: Tensor) -> Tensor:
        """The embeddings of a slice: [N / 16, D of the decoder]."""
        side, patch = self.config.siglip.side, self.config.siglip.patch
        rows, columns = image_YXC.shape[0] // patch, image_YXC.shape[1] // patch
        at = places(rows, columns, 2, self.form.device)
        row, column = (place * side // count for place, count in zip(at, (rows, columns), strict=True))
        x_ND = self.patch_map(image_YXC, 2) + self.places[row * side + column]
        for number, layer in enumerate(self.layers):
            x_ND = layer(x_ND)
            if self.merger is not None and number == self.config.merging_layer:
                x_ND, rows, columns = self.merger(x_ND), rows // 2, columns // 2
        x_ND = self.norm(x_ND)
        for number, (norm, mlp) in enumerate(self.maps):
            if number or self.merger is not None:  # otherwise the patches are in windows
                x_ND = x_ND.view(rows // 2, 2, columns // 2, 2, -1).transpose(1, 2).flatten(0, 3)
            x_ND, rows, columns = mlp(norm(x_ND.view(len(x_ND) // 4, -1))), rows // 2, columns // 2
        return x_ND
