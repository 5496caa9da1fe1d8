"""The tower of InternVL 3 and 3.5 (arXiv 2504.10479 and 2508.18265): InternViT, and two maps of windows of patches.

Shapes: B tiles, N patches of a tile and a token for the tile, D width of the tower.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.models.config_keys import ConfigKeys, wrong
from octavo.models.loader import WeightLoader
from octavo.models.vision.siglip import SiglipConfig, read_siglip
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
    read_merge,
)


@dataclass(frozen=True, kw_only=True)
class InternVLConfig(VisionConfig):
    siglip: SiglipConfig
    merge: int
    norm: type[LayerNorm] | type[RMSNorm]
    projector_activation: Activation
    has_qkv_bias: bool
    norms_queries: bool


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
        siglip, D, ends = config.siglip, config.siglip.width, ("before", "after")
        self.num_heads = siglip.num_heads
        self.norms = [config.norm(weights, f"{prefix}.layernorm_{end}", D, siglip.eps) for end in ends]
        self.scales = [weights.dense(f"{prefix}.lambda_{i}", D) for i in (1, 2)]
        name = f"{prefix}.attention"
        if weights.tensors.has_module(f"{name}.qkv"):
            self.qkv = [Affine(weights, f"{name}.qkv", (3 * D, D), config.has_qkv_bias)]
        else:
            self.qkv = [Affine(weights, f"{name}.{end}_proj", (D, D), config.has_qkv_bias) for end in "qkv"]
        self.head_norms = [RMSNorm(weights, f"{name}.{end}_norm", D, 1e-6) for end in "qk" if config.norms_queries]
        self.out = Affine(weights, f"{name}.projection_layer", (D, D))
        names = f"{prefix}.mlp.fc1", f"{prefix}.mlp.fc2"
        self.mlp = Feedforward(weights, names, (D, siglip.ffn_size, D), siglip.activation)

    def __call__(self, x_BND: Tensor) -> Tensor:
        inner = self.norms[0](x_BND)
        q, k, v = torch.cat([affine(inner) for affine in self.qkv], dim=-1).chunk(3, dim=-1)
        if self.head_norms:
            q, k = (norm(part) for norm, part in zip(self.head_norms, (q, k), strict=True))
        q, k, v = (part.view(*part.shape[:-1], self.num_heads, -1) for part in (q, k, v))
        x_BND = x_BND + self.scales[0] * self.out(attend(q, k, v))
        return x_BND + self.scales[1] * self.mlp(self.norms[1](x_BND))


OWN_NAMES = {
    "vision_model.embeddings.class_embedding": "vision_tower.embeddings.cls_token",
    "vision_model.embeddings.patch_embedding": "vision_tower.embeddings.patch_embeddings.projection",
    "vision_model.embeddings.position_embedding": "vision_tower.embeddings.position_embeddings",
    "vision_model.encoder.layers.": "vision_tower.encoder.layer.",
    ".attn.proj.": ".attention.projection_layer.",
    ".attn.": ".attention.",
    ".norm1.": ".layernorm_before.",
    ".norm2.": ".layernorm_after.",
    ".ls1": ".lambda_1",
    ".ls2": ".lambda_2",
    "mlp1.0.": "multi_modal_projector.layer_norm.",
    "mlp1.1.": "multi_modal_projector.linear_1.",
    "mlp1.3.": "multi_modal_projector.linear_2.",
}
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
        sides = {name: _side(inner, name, default) for name, default in (("patch_size", 14), ("image_size", 448))}
        given, merge = inner.over({**inner.values, **sides}), read_merge(keys, "downsample_ratio")
        siglip = read_siglip(given, "gelu", depth=24, width=1024, ffn_size=4096, num_heads=16)
        if siglip.side % merge:
            raise wrong("downsample_ratio", 1 / merge, f"one that divides {siglip.side}, the patches in a row")
        return InternVLConfig(
            hidden_size=text.size("hidden_size", 4096),
            siglip=dataclasses.replace(siglip, has_last_norm=not inner.flag("use_mean_pooling", True)),
            merge=merge,
            norm=inner.choice("norm_type", {"layer_norm": LayerNorm, "rms_norm": RMSNorm}, "layer_norm"),
            projector_activation=keys.choice("projector_hidden_act", ACTIVATIONS, "gelu"),
            has_qkv_bias=inner.flag("attention_bias"),
            norms_queries=inner.flag("use_qk_norm"),
        )

    def __init__(self, config: InternVLConfig, weights: WeightLoader) -> None:
        self.config, siglip = config, config.siglip
        D, wide, name = siglip.width, config.hidden_size, "vision_tower.embeddings"
        self.patch_map = PatchMap(weights, f"{name}.patch_embeddings.projection", D, siglip.patch)
        self.tile_token = weights.dense(f"{name}.cls_token", 1, 1, D)
        self.places = weights.dense(f"{name}.position_embeddings", 1, 1 + siglip.side**2, D)
        prefix = "vision_tower.encoder.layer"
        self.layers = [InternVLLayer(config, weights, f"{prefix}.{i}") for i in range(siglip.depth)]
        self.norm = LayerNorm(weights, "vision_tower.layernorm", D, siglip.eps) if siglip.has_last_norm else None
        inner, name = D * config.merge**2, "multi_modal_projector"
        self.projector_norm = LayerNorm(weights, f"{name}.layer_norm", inner, 1e-5)
        names = f"{name}.linear_1", f"{name}.linear_2"
        self.projector = Feedforward(weights, names, (inner, wide, wide), config.projector_activation)

    def __call__(self, image: Pixels) -> Tensor:
        """The embeddings of an image, tile by tile."""
        x_BND = self.patch_map(normalised(image.pixels, image.mean, image.deviation))
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

    own_names = OWN_NAMES


class QianfanTower(InternVLTower):
    """The tower of Qianfan-OCR (Baidu), with the weights' names of OpenGVLab's repositories."""

    @classmethod
    def read_config(cls, keys: ConfigKeys) -> InternVLConfig:
        inner = {"attention_bias": True, **part(keys, "vision_config").values}
        return super().read_config(ConfigKeys({**keys.values, "vision_config": inner}))

    own_names = OWN_NAMES
