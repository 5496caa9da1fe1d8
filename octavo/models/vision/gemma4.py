"""The vision tower of Gemma 4 (Google, 2026), and what its 12B model has in place of one.

Images keep their ratio and have up to a number of embeddings that the processor sets. A patch's place is learned for
each axis, and rotates each half of a head by one of them; the output is averaged over squares of patches.

Shapes: N patches, D width of the tower, H head dim, P side of a patch.
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
    LayerNorm,
    RMSNorm,
    attend,
    colours_first,
    normalised,
    part,
    patches,
    places,
    read_theta,
    rms_normed,
    turn,
    turns,
)


@dataclass(frozen=True, kw_only=True)
class Gemma4VisionConfig(VisionConfig):
    depth: int
    width: int
    ffn_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    patch: int
    pool: int
    """Patches in a row of the squares that are averaged."""
    num_places: int
    theta: float
    eps: float
    activation: Activation
    is_clipped: bool
    is_standardised: bool


def _is_bidirectional(text: ConfigKeys, default: str | None) -> bool:
    return bool(text.get("use_bidirectional_attention", default) == "vision")


class ClippedAffine:
    """A linear map whose inputs and outputs are limited, in checkpoints that say so."""

    def __init__(self, weights: WeightLoader, name: str, size: tuple[int, int], is_clipped: bool) -> None:
        self.map = Affine(weights, f"{name}.linear", size, has_bias=False)
        self.bounds: list[Tensor] = []
        if is_clipped:
            ends = ("input_min", "input_max", "output_min", "output_max")
            self.bounds = [weights.dense(f"{name}.{end}") for end in ends]

    def __call__(self, x: Tensor) -> Tensor:
        if not self.bounds:
            return self.map(x)
        return self.map(x.clamp(*self.bounds[:2])).clamp(*self.bounds[2:])


class Gemma4VisionLayer:
    """Attention and feed-forward layer, with norms before and after each."""

    def __init__(self, config: Gemma4VisionConfig, weights: WeightLoader, prefix: str) -> None:
        D, H, eps = config.width, config.head_dim, config.eps
        self.config = config
        ends = ("input", "post_attention", "pre_feedforward", "post_feedforward")
        self.norms = [RMSNorm(weights, f"{prefix}.{end}_layernorm", D, eps) for end in ends]
        self.head_norms = [RMSNorm(weights, f"{prefix}.self_attn.{end}_norm", H, eps) for end in "qk"]

        def affine(name: str, num_outputs: int, num_inputs: int) -> ClippedAffine:
            return ClippedAffine(weights, f"{prefix}.{name}_proj", (num_outputs, num_inputs), config.is_clipped)

        counts = config.num_heads, config.num_kv_heads, config.num_kv_heads
        self.qkv = [affine(f"self_attn.{end}", count * H, D) for end, count in zip("qkv", counts, strict=True)]
        self.out = affine("self_attn.o", D, config.num_heads * H)
        self.gate, self.up = (affine(f"mlp.{end}", config.ffn_size, D) for end in ("gate", "up"))
        self.down = affine("mlp.down", D, config.ffn_size)

    def __call__(self, x_ND: Tensor, angles: list[tuple[Tensor, Tensor]]) -> Tensor:
        config, inner = self.config, self.norms[0](x_ND)
        q, k, v = (affine(inner).view(len(inner), -1, config.head_dim) for affine in self.qkv)
        q, k = (self.turned(norm(heads), angles) for norm, heads in zip(self.head_norms, (q, k), strict=True))
        x_ND = x_ND + self.norms[1](self.out(attend(q, k, rms_normed(v, config.eps), scale=1.0)))
        inner = self.norms[2](x_ND)
        return x_ND + self.norms[3](self.down(config.activation(self.gate(inner)) * self.up(inner)))

    def turned(self, heads: Tensor, angles: list[tuple[Tensor, Tensor]]) -> Tensor:
        """With the first half of each head rotated by the column, the second by the row."""
        halves = zip(heads.chunk(2, dim=-1), angles, strict=True)
        return torch.cat([turn(half, cos, sin) for half, (cos, sin) in halves], dim=-1)


class Gemma4Tower:
    """See the module's docstring."""

    @classmethod
    def read_config(cls, keys: ConfigKeys) -> Gemma4VisionConfig:
        inner, text = part(keys, "vision_config"), part(keys, "text_config")
        width, num_heads = inner.size("hidden_size", 768), inner.size("num_attention_heads", 12)
        head_dim = inner.size("head_dim", 64)
        if head_dim % 4:
            raise wrong("head_dim", head_dim, "a multiple of 4, as each half is rotated by one axis")
        return Gemma4VisionConfig(
            hidden_size=text.size("hidden_size", 2304),
            is_bidirectional=_is_bidirectional(text, None),
            depth=inner.size("num_hidden_layers", 16),
            width=width,
            ffn_size=inner.size("intermediate_size", 3072),
            num_heads=num_heads,
            num_kv_heads=inner.size("num_key_value_heads", num_heads),
            head_dim=head_dim,
            patch=inner.size("patch_size", 16),
            pool=inner.size("pooling_kernel_size", 3),
            num_places=inner.size("position_embedding_size", 10_240),
            theta=read_theta(inner, 100.0),
            eps=inner.number("rms_norm_eps", 1e-6),
            activation=inner.choice("hidden_activation", ACTIVATIONS, "gelu_pytorch_tanh"),
            is_clipped=inner.flag("use_clipped_linears"),
            is_standardised=inner.flag("standardize"),
        )

    def __init__(self, config: Gemma4VisionConfig, weights: WeightLoader) -> None:
        self.config, self.form = config, weights.form
        D, P, name = config.width, config.patch, "vision_tower"
        stored = weights.dense(f"{name}.patch_embedder.input_proj.weight", D, 3 * P * P)
        self.patch_map = colours_first(stored, P)
        self.places = weights.dense(f"{name}.patch_embedder.position_embedding_table", 2, config.num_places, D)
        prefix = f"{name}.encoder.layers"
        self.layers = [Gemma4VisionLayer(config, weights, f"{prefix}.{i}") for i in range(config.depth)]
        self.standard: list[Tensor] = []
        if config.is_standardised:
            self.standard = [weights.exact(f"{name}.std_{end}", D) for end in ("bias", "scale")]
        self.map = Affine(weights, "embed_vision.embedding_projection", (config.hidden_size, D), has_bias=False)

    def __call__(self, image: Pixels) -> Tensor:
        """The embeddings of an image, row by row."""
        config = self.config
        image_YXC = normalised(image.pixels[0], image.mean, image.deviation)
        rows, columns = image_YXC.shape[0] // config.patch, image_YXC.shape[1] // config.patch
        flat = patches(image_YXC, config.patch).to(self.form.dtype)
        row, column = places(rows, columns, 1, self.form.device)
        x_ND = functional.linear(flat, self.patch_map) + self.places[0, column] + self.places[1, row]
        angles = [self.angles(column), self.angles(row)]
        for layer in self.layers:
            x_ND = layer(x_ND, angles)
        grid = x_ND.float().view(rows // config.pool, config.pool, columns // config.pool, config.pool, -1)
        pooled = grid.mean((1, 3)).flatten(0, 1) * config.width**0.5
        if self.standard:
            pooled = (pooled - self.standard[0]) * self.standard[1]
        return self.map(rms_normed(pooled.to(self.form.dtype), config.eps))

    def angles(self, place_N: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines of half a head for places on one axis, [N, H / 4]."""
        angles = turns(place_N, self.config.head_dim // 2, self.config.theta)
        return angles.cos(), angles.sin()


@dataclass(frozen=True, kw_only=True)
class Gemma4UnifiedVisionConfig(VisionConfig):
    side: int
    """Pixels of the side of an embedding's square."""
    width: int
    num_places: int
    eps: float


class Gemma4UnifiedTower:
    """Gemma 4 12B projects squares of pixels without any attention."""

    @classmethod
    def read_config(cls, keys: ConfigKeys) -> Gemma4UnifiedVisionConfig:
        inner, text = part(keys, "vision_config"), part(keys, "text_config")
        return Gemma4UnifiedVisionConfig(
            hidden_size=text.size("hidden_size", 3840),
            is_bidirectional=_is_bidirectional(text, "vision"),
            side=inner.size("patch_size", 16) * inner.size("pooling_kernel_size", 3),
            width=inner.size("mm_embed_dim", 3840),
            num_places=inner.size("mm_posemb_size", 1120),
            eps=inner.number("rms_norm_eps", 1e-6),
        )

    def __init__(self, config: Gemma4UnifiedVisionConfig, weights: WeightLoader) -> None:
        self.config, self.form = config, weights.form
        D, numbers, name = config.width, 3 * config.side**2, "vision_embedder"
        self.patch_norm = LayerNorm(weights, f"{name}.patch_ln1", numbers, 1e-5)
        self.patch_map = Affine(weights, f"{name}.patch_dense", (D, numbers))
        self.map_norm = LayerNorm(weights, f"{name}.patch_ln2", D, 1e-5)
        self.places = weights.dense(f"{name}.pos_embedding", config.num_places, 2, D)
        self.place_norm = LayerNorm(weights, f"{name}.pos_norm", D, 1e-5)
        self.map = Affine(weights, "embed_vision.embedding_projection", (config.hidden_size, D), has_bias=False)
        for of_pixels in (self.patch_norm, self.patch_map):
            of_pixels.weight = colours_first(of_pixels.weight, config.side)
        self.patch_norm.bias = colours_first(self.patch_norm.bias, config.side)

    def __call__(self, image: Pixels) -> Tensor:
        """The embeddings of an image, row by row."""
        image_YXC = normalised(image.pixels[0], image.mean, image.deviation)
        rows, columns = image_YXC.shape[0] // self.config.side, image_YXC.shape[1] // self.config.side
        row, column = places(rows, columns, 1, self.form.device)
        flat = patches(image_YXC, self.config.side).to(self.form.dtype)
        x_ND = self.map_norm(self.patch_map(self.patch_norm(flat)))
        x_ND = self.place_norm(x_ND + self.places[column, 0] + self.places[row, 1])
        return self.map(rms_normed(x_ND, self.config.eps))
