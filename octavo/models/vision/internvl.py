"""The tower of InternVL 3 and 3.5 (arXiv 2504.10479 and 2508.18265): InternViT, and two maps of windows of patches.

Shapes: B tiles, N patches of a tile and a token for the tile, D width of the tower.
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
    Activation,
    Affine,
    Feedforward,
    LayerNorm,
    RMSNorm,
    attend,
    merged,
    normalised,
    part,
    patches,
    read_merge,
)
from octavo.models.vision.tower import Pixels, VisionConfig


@dataclass(frozen=True, kw_only=True)
class InternVLConfig(VisionConfig):
    depth: int
    width: int
    ffn_size: int
    num_heads: int
    patch: int
    num_patches: int
    merge: int
    eps: float
    norm: type[LayerNorm] | type[RMSNorm]
    activation: Activation
    projector_activation: Activation
    has_qkv_bias: bool
    norms_queries: bool
    has_last_norm: bool


def _side(keys: ConfigKeys, name: str, default: int) -> int:
    """A side of a square, given once or twice."""
    given = keys.get(name, default)
    sides = given if isinstance(given, list) else [given]
    if not sides or any(type(side) is not int or side < 1 or side != sides[0] for side in sides):
        raise wrong(name, given, "the side of a square")
    return int(sides[0])


class InternVLLayer:
    """Attention and feed-forward layer, whose outputs are scaled."""

    def __init__(self, config: InternVLConfig, weights: WeightLoader, prefix: str) -> None:
        D = config.width
        self.num_heads = config.num_heads
        ends = ("before", "after")
        self.norms = [config.norm(weights, f"{prefix}.layernorm_{end}", D, config.eps) for end in ends]
        self.scales = [weights.dense(f"{prefix}.lambda_{i}", D) for i in (1, 2)]
        name = f"{prefix}.attention"
        if weights.tensors.has_module(f"{name}.qkv"):
            self.qkv = [Affine(weights, f"{name}.qkv", (3 * D, D), config.has_qkv_bias)]
        else:
            self.qkv = [Affine(weights, f"{name}.{end}_proj", (D, D), config.has_qkv_bias) for end in "qkv"]
        self.head_norms = [RMSNorm(weights, f"{name}.{end}_norm", D, 1e-6) for end in "qk" if config.norms_queries]
        self.out = Affine(weights, f"{name}.projection_layer", (D, D))
        names = f"{prefix}.mlp.fc1", f"{prefix}.mlp.fc2"
        self.mlp = Feedforward(weights, names, (D, config.ffn_size, D), config.activation)

    def __call__(self, x_BND: Tensor) -> Tensor:
        inner = self.norms[0](x_BND)
        q, k, v = torch.cat([affine(inner) for affine in self.qkv], dim=-1).chunk(3, dim=-1)
        if self.head_norms:
            q, k = (norm(part) for norm, part in zip(self.head_norms, (q, k), strict=True))
        q, k, v = (part.view(*part.shape[:-1], self.num_heads, -1) for part in (q, k, v))
        x_BND = x_BND + self.scales[0] * self.out(attend(q, k, v))
        return x_BND + self.scales[1] * self.mlp(self.norms[1](x_BND))


OWN_NAMES = (
    ("vision_model.embeddings.class_embedding", "vision_tower.embeddings.cls_token"),
    ("vision_model.embeddings.patch_embedding", "vision_tower.embeddings.patch_embeddings.projection"),
    ("vision_model.embeddings.position_embedding", "vision_tower.embeddings.position_embeddings"),
    ("vision_model.encoder.layers.", "vision_tower.encoder.layer."),
    (".attn.proj.", ".attention.projection_layer."),
    (".attn.", ".attention."),
    (".norm1.", ".layernorm_before."),
    (".norm2.", ".layernorm_after."),
    (".ls1", ".lambda_1"),
    (".ls2", ".lambda_2"),
    ("mlp1.0.", "multi_modal_projector.layer_norm."),
    ("mlp1.1.", "multi_modal_projector.linear_1."),
    ("mlp1.3.", "multi_modal_projector.linear_2."),
)
"""Parts of names in OpenGVLab's repositories, and what transformers has in their place."""


class InternVLTower:
    """See the module's docstring."""

    @classmethod
    def read_config(cls, keys: ConfigKeys) -> InternVLConfig:
        inner, text = part(keys, "vision_config"), part(keys, "text_config")
        layer, strategy = keys.get("vision_feature_layer", -1), keys.get("vision_feature_select_strategy", "default")
        if layer != -1:
            raise wrong("vision_feature_layer", layer, "-1, the last layer")
        if strategy != "default":
            raise wrong("vision_feature_select_strategy", strategy, "default")
        patch, merge = _side(inner, "patch_size", 14), read_merge(keys, "downsample_ratio")
        side = _side(inner, "image_size", 448) // patch
        if side % merge:
            raise wrong("downsample_ratio", 1 / merge, f"one that divides {side}, the patches in a row")
        return InternVLConfig(
            hidden_size=text.size("hidden_size", 4096),
            depth=inner.size("num_hidden_layers", 24),
            width=inner.size("hidden_size", 1024),
            ffn_size=inner.size("intermediate_size", 4096),
            num_heads=inner.size("num_attention_heads", 16),
            patch=patch,
            num_patches=side**2,
            merge=merge,
            eps=inner.number("layer_norm_eps", 1e-6),
            norm=inner.choice("norm_type", {"layer_norm": LayerNorm, "rms_norm": RMSNorm}, "layer_norm"),
            activation=inner.choice("hidden_act", ACTIVATIONS, "gelu"),
            projector_activation=keys.choice("projector_hidden_act", ACTIVATIONS, "gelu"),
            has_qkv_bias=inner.flag("attention_bias"),
            norms_queries=inner.flag("use_qk_norm"),
            has_last_norm=not inner.flag("use_mean_pooling", True),
        )

    def __init__(self, config: InternVLConfig, weights: WeightLoader) -> None:
        self.config, self.form = config, weights.form
        D, P, wide, name = config.width, config.patch, config.hidden_size, "vision_tower.embeddings"
        self.patch_map = weights.dense(f"{name}.patch_embeddings.projection.weight", D, 3, P, P).reshape(D, -1)
        self.patch_bias = weights.dense(f"{name}.patch_embeddings.projection.bias", D)
        self.tile_token = weights.dense(f"{name}.cls_token", 1, 1, D)
        self.places = weights.dense(f"{name}.position_embeddings", 1, 1 + config.num_patches, D)
        prefix = "vision_tower.encoder.layer"
        self.layers = [InternVLLayer(config, weights, f"{prefix}.{i}") for i in range(config.depth)]
        self.norm = LayerNorm(weights, "vision_tower.layernorm", D, config.eps) if config.has_last_norm else None
        inner, name = D * config.merge**2, "multi_modal_projector"
        self.projector_norm = LayerNorm(weights, f"{name}.layer_norm", inner, 1e-5)
        names = f"{name}.linear_1", f"{name}.linear_2"
        self.projector = Feedforward(weights, names, (inner, wide, wide), config.projector_activation)

    def __call__(self, image: Pixels) -> Tensor:
        """The embeddings of an image, tile by tile."""
        tiles = normalised(image.pixels, image.mean, image.deviation)
        flat = torch.stack([patches(tile, self.config.patch) for tile in tiles]).to(self.form.dtype)
        x_BND = functional.linear(flat, self.patch_map, self.patch_bias)
        x_BND = torch.cat([self.tile_token.expand(len(x_BND), 1, -1), x_BND], dim=1) + self.places
        for layer in self.layers:
            x_BND = layer(x_BND)
        if self.norm is not None:
            x_BND = self.norm(x_BND)
        windows = merged(x_BND[:, 1:], self.config.merge)
        return self.projector(self.projector_norm(windows)).flatten(0, 1)


class InternVLChatTower(InternVLTower):
    """The same as OpenGVLab's repositories have it."""

    @classmethod
    def read_config(cls, keys: ConfigKeys) -> InternVLConfig:
        inner = part(keys, "vision_config")
        version, squares = keys.get("ps_version", "v1"), keys.get("pad2square", False)
        if version != "v2":
            raise wrong("ps_version", version, "v2")
        if squares:
            raise wrong("pad2square", squares, "false")
        own = {
            "attention_bias": inner.get("qkv_bias", True),
            "use_qk_norm": inner.get("qk_normalization", True),
            "norm_type": inner.get("norm_type", "rms_norm"),
            "image_size": keys.get("force_image_size") or inner.get("image_size", 448),
        }
        given = {**inner.values, **own}
        values = {"vision_config": given, "text_config": keys.get("llm_config")}
        values |= {"downsample_ratio": keys.get("downsample_ratio", 0.5)}
        return super().read_config(ConfigKeys(values | {"vision_feature_layer": keys.get("select_layer", -1)}))

    @staticmethod
    def own_name(name: str) -> str:
        """The name in transformers."""
        for stored, own in OWN_NAMES:
            name = name.replace(stored, own)
        return name


class QianfanTower(InternVLTower):
    """The tower of Qianfan-OCR (Baidu), with the weights' names of OpenGVLab's repositories."""

    @classmethod
    def read_config(cls, keys: ConfigKeys) -> InternVLConfig:
        inner = {"attention_bias": True, **part(keys, "vision_config").values}
        return super().read_config(ConfigKeys({**keys.values, "vision_config": inner}))

    own_name = InternVLChatTower.own_name
