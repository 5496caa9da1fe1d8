"""The encoders of SigLIP (arXiv 2303.15343) and CLIP (arXiv 2103.00020), for images of one size.

Three towers have little more: those of Gemma 3 and PaliGemma, and that of Idefics 3 (arXiv 2408.12637) and SmolVLM
(arXiv 2504.05299).

Shapes: B images, N patches, D width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from octavo.models.config_keys import ConfigKeys, wrong
from octavo.models.loader import WeightLoader
from octavo.models.vision.tower import Pixels, VisionConfig
from octavo.models.vision.tower_parts import (
    ACTIVATIONS,
    Activation,
    Affine,
    Feedforward,
    LayerNorm,
    PatchMap,
    RMSNorm,
    attend,
    merged,
    normalised,
    part,
    turn,
)


@dataclass(frozen=True)
class SiglipConfig:
    depth: int
    width: int
    ffn_size: int
    num_heads: int
    patch: int
    image: int
    """Side of the images in pixels."""
    eps: float
    activation: Activation
    is_clip: bool = False
    """Whether it has a token for the image, which is dropped, and a norm before the layers instead of behind them."""
    has_last_norm: bool = True
    outputs: tuple[int, ...] = ()
    """Layers, of which the first is 1, whose outputs are joined; 0: their input. Empty: the last one's output."""

    @property
    def side(self) -> int:
        """Patches in a row."""
        return self.image // self.patch


def read_siglip(
    keys: ConfigKeys, activation: str = "gelu_pytorch_tanh", depth: int = 12, width: int = 768, ffn_size: int = 3072,
    num_heads: int = 12, patch: int = 16, image: int = 224,
) -> SiglipConfig:  # fmt: skip
    """Read the configuration; the others are a family's defaults. Raises ``CheckpointError``."""
    return SiglipConfig(
        depth=keys.size("num_hidden_layers", depth),
        width=keys.size("hidden_size", width),
        ffn_size=keys.size("intermediate_size", ffn_size),
        num_heads=keys.size("num_attention_heads", num_heads),
        patch=keys.size("patch_size", patch),
        image=keys.size("image_size", image),
        eps=keys.number("layer_norm_eps", 1e-6),
        activation=keys.choice("hidden_act", ACTIVATIONS, activation),
    )


class SiglipLayer:
    """Attention and feed-forward layer."""

    def __init__(self, config: SiglipConfig, weights: WeightLoader, prefix: str) -> None:
        D = config.width
        self.num_heads = config.num_heads
        self.norms = [LayerNorm(weights, f"{prefix}.layer_norm{i}", D, config.eps) for i in (1, 2)]
        self.qkv = [Affine(weights, f"{prefix}.self_attn.{name}_proj", (D, D)) for name in "qkv"]
        self.out = Affine(weights, f"{prefix}.self_attn.out_proj", (D, D))
        names = f"{prefix}.mlp.fc1", f"{prefix}.mlp.fc2"
        self.mlp = Feedforward(weights, names, (D, config.ffn_size, D), config.activation)

    def __call__(self, x_BND: Tensor, angles: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """``angles``: cosines and sines by which queries and keys rotate, [B * N, R]."""
        inner = self.norms[0](x_BND)
        q, k, v = (affine(inner).view(*inner.shape[:-1], self.num_heads, -1) for affine in self.qkv)
        if angles is not None:
            q, k = (turn(x.flatten(0, -3), *angles).view_as(x) for x in (q, k))
        x_BND = x_BND + self.out(attend(q, k, v))
        return x_BND + self.mlp(self.norms[1](x_BND))


def tower_prefix(weights: WeightLoader) -> str:
    """Where the encoder's weights are; older versions of transformers saved them deeper."""
    is_deeper = not weights.tensors.is_dummy and weights.tensors.has_module("vision_tower.vision_model")
    return "vision_tower.vision_model" if is_deeper else "vision_tower"


class Siglip:
    """The encoder."""

    def __init__(self, config: SiglipConfig, weights: WeightLoader, prefix: str) -> None:
        self.config, D = config, config.width
        name = f"{prefix}.embeddings.patch_embedding"
        self.patch_map = PatchMap(weights, name, D, config.patch, has_bias=not config.is_clip)
        name, count = f"{prefix}.embeddings.position_embedding.weight", config.side**2
        self.first_norm: LayerNorm | None = None
        if config.is_clip:
            self.places = weights.dense(name, 1 + count, D)
            self.image_token = weights.dense(f"{prefix}.embeddings.class_embedding", D)
            self.first_norm = LayerNorm(weights, f"{prefix}.pre_layrnorm", D, config.eps)
        else:
            self.places = weights.dense(name, count, D)
        self.layers = [SiglipLayer(config, weights, f"{prefix}.encoder.layers.{i}") for i in range(config.depth)]
        self.norm: LayerNorm | None = None
        if config.has_last_norm:
            self.norm = LayerNorm(weights, f"{prefix}.post_layernorm", D, config.eps)

    def __call__(self, images_BYXC: Tensor) -> Tensor:
        """The last layer's output for normalised images, or those of some layers side by side: [B, N, D]."""
        x_BND = self.patch_map(images_BYXC)
        if self.first_norm is not None:
            x_BND = torch.cat([self.image_token.expand(len(x_BND), 1, -1), x_BND], dim=1)
            x_BND = self.first_norm(x_BND + self.places)
        else:
            x_BND = x_BND + self.places
        found = {0: x_BND}
        for number, layer in enumerate(self.layers, 1):
            x_BND = layer(x_BND)
            if number in self.config.outputs:
                found[number] = x_BND
        if self.config.outputs:
            x_BND = torch.cat([found[number] for number in self.config.outputs], dim=-1)
        if self.first_norm is not None:
            x_BND = x_BND[:, 1:]
        return x_BND if self.norm is None else self.norm(x_BND)


@dataclass(frozen=True, kw_only=True)
class Gemma3VisionConfig(VisionConfig):
    siglip: SiglipConfig


class Gemma3Tower:
    """The tower of Gemma 3 (arXiv 2503.19786): the encoder's output, averaged to 256 embeddings."""

    @classmethod
    def read_config(cls, keys: ConfigKeys) -> Gemma3VisionConfig:
        siglip = read_siglip(part(keys, "vision_config"))
        count = keys.size("mm_tokens_per_image", 256)
        side = round(count**0.5)
        if side**2 != count or siglip.side % side:
            raise wrong("mm_tokens_per_image", count, f"the square of a divisor of {siglip.side}, the patches in a row")
        hidden_size = part(keys, "text_config").size("hidden_size", 2304)
        return Gemma3VisionConfig(hidden_size=hidden_size, is_bidirectional=True, longest=count, siglip=siglip)

    def __init__(self, config: Gemma3VisionConfig, weights: WeightLoader) -> None:
        self.config = config
        D, name = config.siglip.width, "multi_modal_projector"
        self.siglip = Siglip(config.siglip, weights, tower_prefix(weights))
        self.norm = RMSNorm(weights, f"{name}.mm_soft_emb_norm", D, config.siglip.eps, 1.0)
        self.map = weights.dense(f"{name}.mm_input_projection_weight", D, config.hidden_size)

    def __call__(self, image: Pixels) -> Tensor:
        """The embeddings of an image, row by row."""
        side, count = self.config.siglip.side, round(self.config.longest**0.5)
        x_BND = self.siglip(normalised(image.pixels, image.mean, image.deviation))
        grid = x_BND.transpose(1, 2).reshape(len(x_BND), -1, side, side)
        pooled = functional.avg_pool2d(grid, side // count).flatten(2).transpose(1, 2)
        return (self.norm(pooled) @ self.map).flatten(0, 1)


MOST_WORDS = 512
"""Tokens of a prompt of PaliGemma besides its image: it was trained with up to 512."""


class PaliGemmaTower:
    """The tower of PaliGemma 1 and 2 (arXiv 2407.07726, 2412.03555): the encoder's output through a map. All of a
    prompt with an image attends to all of it."""

    @classmethod
    def read_config(cls, keys: ConfigKeys) -> Gemma3VisionConfig:
        siglip = read_siglip(part(keys, "vision_config"))
        longest, hidden_size = siglip.side**2 + MOST_WORDS, part(keys, "text_config").size("hidden_size", 2048)
        return Gemma3VisionConfig(hidden_size=hidden_size, is_bidirectional=True, longest=longest, siglip=siglip)

    def __init__(self, config: Gemma3VisionConfig, weights: WeightLoader) -> None:
        self.siglip = Siglip(config.siglip, weights, tower_prefix(weights))
        self.map = Affine(weights, "multi_modal_projector.linear", (config.hidden_size, config.siglip.width))

    def __call__(self, image: Pixels) -> Tensor:
        """The embeddings of an image, row by row."""
        return self.map(self.siglip(normalised(image.pixels, image.mean, image.deviation))).flatten(0, 1)


@dataclass(frozen=True, kw_only=True)
class IdeficsConfig(VisionConfig):
    siglip: SiglipConfig
    merge: int


class Idefics3Tower:
    """The tower of Idefics 3 and SmolVLM: the encoder's output, and a map of windows of patches."""

    @classmethod
    def read_config(cls, keys: ConfigKeys) -> IdeficsConfig:
        siglip, merge = read_siglip(part(keys, "vision_config")), keys.size("scale_factor", 2)
        if siglip.side % merge:
            raise wrong("scale_factor", merge, f"a divisor of {siglip.side}, the patches in a row")
        hidden_size = part(keys, "text_config").size("hidden_size", 4096)
        return IdeficsConfig(hidden_size=hidden_size, siglip=siglip, merge=merge)

    def __init__(self, config: IdeficsConfig, weights: WeightLoader) -> None:
        self.config, D = config, config.siglip.width
        self.siglip = Siglip(config.siglip, weights, "vision_model")
        size = config.hidden_size, D * config.merge**2
        self.map = Affine(weights, "connector.modality_projection.proj", size, has_bias=False)

    def __call__(self, image: Pixels) -> Tensor:
        """The embeddings of an image, tile by tile."""
        x_BND = self.siglip(normalised(image.pixels, image.mean, image.deviation))
        return self.map(merged(x_BND, self.config.merge)).flatten(0, 1)
