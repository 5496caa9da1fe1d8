"""The vision towers of DeepSeek-OCR (arXiv 2510.18234) and DeepSeek-OCR 2 (arXiv 2601.20552).

SAM's encoder, convolutions that make one vector of sixteen patches, and another encoder: CLIP's layers, whose outputs
stand next to their inputs, or those of Qwen2, where learned queries follow the patches and give the embeddings. A large
image is taken in tiles, and then as a whole.

Shapes: B tiles, N patches of a tile behind the convolutions, D width of the second encoder, A heads, H head dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from octavo.models.config_keys import ConfigKeys, wrong
from octavo.models.loader import WeightLoader
from octavo.models.vision.qwen import QwenBlock, QwenConfig
from octavo.models.vision.sam import Halving, Sam, SamConfig, read_sam, resized
from octavo.models.vision.tower import Pixels, VisionConfig
from octavo.models.vision.tower_parts import (
    ACTIVATIONS,
    Affine,
    GatedFeedforward,
    LayerNorm,
    RMSNorm,
    attend,
    normalised,
    part,
    read_theta,
    turn,
    turns,
    unpacked,
    whole_numbers,
)

OWN_NAMES = {
    "sam_model.blocks.": "vision_tower.sam_encoder.layers.",
    "sam_model.": "vision_tower.sam_encoder.",
    "patch_embed.proj.": "patch_embed.projection.",
    "neck.0.": "neck.conv1.",
    "neck.1.": "neck.norm1.",
    "neck.2.": "neck.conv2.",
    "neck.3.": "neck.norm2.",
    "net_2.": "proj.conv1.",
    "net_3.": "proj.conv2.",
    "vision_model.": "vision_tower.vision_encoder.",
    "qwen2_model.model.model.": "vision_tower.vision_encoder.",
    "qwen2_model.query_768.": "vision_tower.query_768_resolution.",
    "qwen2_model.query_1024.": "vision_tower.query_1024_resolution.",
    ".transformer.": ".encoder.",
    ".layer_norm": ".norm",
    ".self_attn.qkv_proj.": ".attn.qkv.",
    ".self_attn.out_proj.": ".attn.proj.",
    "projector.layers.": "multi_modal_projector.",
    "view_seperator": "view_separator",
}
"""Parts of names in DeepSeek's repositories or in transformers, and what is in their place here."""
QWEN2: dict[str, Any] = {
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
}
"""The second encoder of DeepSeek-OCR 2, of which its configuration says the width alone."""


@dataclass(frozen=True, kw_only=True)
class DeepseekOCRConfig(VisionConfig):
    sam: SamConfig
    sizes: tuple[int, int]
    """Numbers of a place behind each of the two convolutions."""
    encoder: QwenConfig
    theta: float = 0.0


def read_encoders(keys: ConfigKeys) -> tuple[int, ConfigKeys, ConfigKeys]:
    """Width of the decoder, and the keys of both encoders under transformers' names. Raises ``CheckpointError``."""
    inner = part(keys, "vision_config")
    text = part(keys, "text_config" if keys.get("text_config") else "language_config")
    given = inner.child("width")
    if given is None:
        return text.size("hidden_size", 1280), part(inner, "sam_config"), part(inner, "encoder_config")
    names = {"width": "hidden_size", "dim": "hidden_size", "heads": "num_attention_heads"}
    names |= {"layers": "num_hidden_layers"}
    found = {
        "sam" if name.startswith("sam") else "other": {
            names.get(key, key): value for key, value in part(given, name).values.items()
        }
        for name in given.values
    }
    return text.size("hidden_size", 1280), ConfigKeys(found.get("sam", {})), ConfigKeys(found.get("other", {}))


def read_channels(sam: ConfigKeys, width: int) -> tuple[int, int]:
    """Numbers of a place behind each convolution; the second has the ``width`` of the other encoder."""
    sizes = whole_numbers(sam, "downsample_channels", (512, width), low=1)
    if not sizes:
        raise wrong("downsample_channels", sizes, "two sizes")
    return sizes[0], width


class DeepseekOCRTower:
    """The tower of DeepSeek-OCR."""

    @classmethod
    def read_config(cls, keys: ConfigKeys) -> DeepseekOCRConfig:
        hidden_size, sam, inner = read_encoders(keys)
        width = inner.size("hidden_size", 1024)
        encoder = QwenConfig(
            hidden_size=width,
            depth=inner.size("num_hidden_layers", 24),
            width=width,
            ffn_size=inner.size("intermediate_size", 4 * width),
            num_heads=inner.size("num_attention_heads", 16),
            patch=inner.size("patch_size", 14),
            activation=ACTIVATIONS["quick_gelu"],
            ups=("fc1", "fc2"),
            eps=inner.number("layer_norm_eps", 1e-5),
            num_places=(inner.size("image_size", 224) // inner.size("patch_size", 14)) ** 2,
        )
        return DeepseekOCRConfig(
            hidden_size=hidden_size, sam=read_sam(sam), sizes=read_channels(sam, width), encoder=encoder
        )

    own_names = OWN_NAMES

    def __init__(self, config: DeepseekOCRConfig, weights: WeightLoader) -> None:
        self.config, self.form, name = config, weights.form, "vision_tower.sam_encoder"
        self.sam = Sam(config.sam, weights, name)
        sizes = config.sam.output_size, *config.sizes
        self.halving = Halving(weights, [f"{name}.proj.conv{i}" for i in (1, 2)], sizes)
        self.load_encoder(config.encoder, weights, "vision_tower.vision_encoder")
        self.map = Affine(weights, "multi_modal_projector", (config.hidden_size, self.num_mapped))
        self.separator = weights.dense("view_separator", config.hidden_size)

    num_mapped: int
    """Numbers of an embedding before it is brought to the decoder's width."""

    def load_encoder(self, config: QwenConfig, weights: WeightLoader, name: str) -> None:
        D, self.num_mapped, side = config.width, 2 * config.width, round(config.num_places**0.5)
        self.tile_token = weights.dense(f"{name}.embeddings.class_embedding", D)
        stored = weights.dense(f"{name}.embeddings.position_embedding.weight", 1 + config.num_places, D)
        self.tile_place, self.places = stored[:1], stored[1:].view(side, side, D)
        self.first_norm = LayerNorm(weights, f"{name}.pre_layrnorm", D, config.eps)
        self.blocks = [QwenBlock(config, weights, f"{name}.encoder.layers.{i}") for i in range(config.depth)]
        self.line_end = weights.dense("image_newline", self.config.hidden_size)

    def __call__(self, image: Pixels) -> Tensor:
        """The embeddings of the tiles, if there are any, those of the entire image, and one behind them."""
        rows, columns, *_ = image.details
        *tiles, whole = (normalised(tile, image.mean, image.deviation) for tile in unpacked(image))
        found = [self.arranged(self.encoded(torch.stack(tiles)), rows, columns)] if tiles else []
        found.append(self.arranged(self.encoded(whole[None]), 1, 1))
        return torch.cat([*found, self.separator[None]])

    def encoded(self, images_BYXC: Tensor) -> Tensor:
        """The embeddings of tiles, [B, N, D of the decoder], row by row."""
        x_BDYX = self.halving(self.sam(images_BYXC))
        x_BND = x_BDYX.flatten(2).transpose(1, 2)
        return self.map(torch.cat([self.second(x_BND, *x_BDYX.shape[2:]), x_BND], dim=-1))

    def second(self, x_BND: Tensor, rows: int, columns: int) -> Tensor:
        """The second encoder's output, without that of the tile's token."""
        places = torch.cat([self.tile_place, resized(self.places, rows, columns).flatten(0, 1)])
        x_BND = torch.cat([self.tile_token.expand(len(x_BND), 1, -1), x_BND], dim=1) + places
        found = []
        for x_ND in self.first_norm(x_BND):
            for block in self.blocks:
                x_ND = block(x_ND, None)
            found.append(x_ND[1:])
        return torch.stack(found)

    def arranged(self, x_BND: Tensor, rows: int, columns: int) -> Tensor:
        """The rows of embeddings of all tiles next to each other, each with the embedding that ends it."""
        cells = round(x_BND.shape[1] ** 0.5)
        grid = x_BND.view(rows, columns, cells, cells, -1).transpose(1, 2).reshape(rows * cells, columns * cells, -1)
        return torch.cat([grid, self.line_end.expand(len(grid), 1, -1)], dim=1).flatten(0, 1)


class QueryLayer:
    """A layer of Qwen2, in which patches see each other, and queries all patches and the queries before them."""

    def __init__(self, config: QwenConfig, weights: WeightLoader, prefix: str) -> None:
        D, self.sizes = config.width, (config.num_heads, config.num_kv_heads)
        H = D // config.num_heads
        ends = zip("qkv", (config.num_heads, config.num_kv_heads, config.num_kv_heads), strict=True)
        self.maps = [Affine(weights, f"{prefix}.self_attn.{end}_proj", (count * H, D)) for end, count in ends]
        self.out = Affine(weights, f"{prefix}.self_attn.o_proj", (D, D), has_bias=False)
        names = "input_layernorm", "post_attention_layernorm"
        self.norms = [RMSNorm(weights, f"{prefix}.{name}", D, config.eps) for name in names]
        self.mlp = GatedFeedforward(weights, f"{prefix}.mlp", (D, config.ffn_size), config.activation, has_bias=False)

    def __call__(self, x_LD: Tensor, angles: tuple[Tensor, Tensor], num_patches: int) -> Tensor:
        """``x``: patches and then queries."""
        inner = self.norms[0](x_LD)
        q, k, v = (each(inner).view(len(x_LD), -1, x_LD.shape[1] // self.sizes[0]) for each in self.maps)
        q, k = turn(q, *angles), turn(k, *angles)
        patches = attend(q[:num_patches], k[:num_patches], v[:num_patches])
        later = torch.ones(len(q) - num_patches, len(q), dtype=torch.bool, device=q.device).tril(num_patches)
        asking, k, v = (each.transpose(0, 1)[None] for each in (q[num_patches:], k, v))
        queries = functional.scaled_dot_product_attention(asking, k, v, attn_mask=later, enable_gqa=True)
        x_LD = x_LD + self.out(torch.cat([patches, queries[0].transpose(0, 1).flatten(1)]))
        return x_LD + self.mlp(self.norms[1](x_LD))


class DeepseekOCR2Tower(DeepseekOCRTower):
    """The tower of DeepSeek-OCR 2."""

    @classmethod
    def read_config(cls, keys: ConfigKeys) -> DeepseekOCRConfig:
        hidden_size, sam, inner = read_encoders(keys)
        inner = ConfigKeys({**QWEN2, **inner.values})
        width = inner.size("hidden_size")
        encoder = QwenConfig(
            hidden_size=width,
            depth=inner.size("num_hidden_layers"),
            width=width,
            ffn_size=inner.size("intermediate_size"),
            num_heads=inner.size("num_attention_heads"),
            num_kv_heads=inner.size("num_key_value_heads"),
            patch=1,
            activation=ACTIVATIONS["silu"],
            eps=inner.number("rms_norm_eps", 1e-6),
        )
        return DeepseekOCRConfig(
            hidden_size=hidden_size,
            sam=read_sam(sam),
            sizes=read_channels(sam, width),
            encoder=encoder,
            theta=read_theta(inner, 1_000_000.0),
        )

    def load_encoder(self, config: QwenConfig, weights: WeightLoader, name: str) -> None:
        D, self.num_mapped = config.width, config.width
        self.layers = [QueryLayer(config, weights, f"{name}.layers.{i}") for i in range(config.depth)]
        self.norm = RMSNorm(weights, f"{name}.norm", D, config.eps)
        side = self.config.sam.side // 4
        counts = {"768": (side * 3 // 4) ** 2, "1024": side**2}
        stored = [weights.dense(f"vision_tower.query_{n}_resolution.weight", count, D) for n, count in counts.items()]
        self.queries = {len(each): each for each in stored}

    def encoded(self, images_BYXC: Tensor) -> Tensor:
        """As many embeddings of each tile as it has patches."""
        return torch.stack([self.of_tile(x_DN.t()) for x_DN in self.halving(self.sam(images_BYXC)).flatten(2)])

    def of_tile(self, x_ND: Tensor) -> Tensor:
        count, encoder = len(x_ND), self.config.encoder
        H = encoder.width // encoder.num_heads
        angles = turns(torch.arange(2 * count, device=x_ND.device), H, self.config.theta)
        x_LD = torch.cat([x_ND, self.queries[count]])
        for layer in self.layers:
            x_LD = layer(x_LD, (angles.cos(), angles.sin()), count)
        return self.map(self.norm(x_LD[count:]))

    def arranged(self, x_BND: Tensor, rows: int, columns: int) -> Tensor:
        """The embeddings tile by tile."""
        return x_BND.flatten(0, 1)
