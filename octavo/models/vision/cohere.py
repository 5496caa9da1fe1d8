"""The vision towers of Aya Vision (arXiv 2505.08751) and Command A Vision (Cohere, 2025): SigLIP, and two maps.

Windows of patches become one embedding; half of what the first map makes gates the other half. Aya Vision has a norm
before it.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional

from octavo.models.config_keys import ConfigKeys, wrong
from octavo.models.loader import WeightLoader
from octavo.models.vision.siglip import Siglip, SiglipConfig, read_siglip, tower_prefix
from octavo.models.vision.tower import Pixels, VisionConfig
from octavo.models.vision.tower_parts import Affine, LayerNorm, merged, normalised, part


@dataclass(frozen=True, kw_only=True)
class CohereConfig(VisionConfig):
    siglip: SiglipConfig
    merge: int
    inner_size: int
    """Numbers between the maps, gates included."""
    norm_eps: float = 0.0
    """Of the norm before the maps; 0: there is none."""


def read_cohere(keys: ConfigKeys, inner_size: int, norm_eps: float = 0.0) -> CohereConfig:
    """Read the configuration, with the family's default of the inner size. Raises ``CheckpointError``."""
    siglip, merge = read_siglip(part(keys, "vision_config")), keys.size("downsample_factor", 2)
    if siglip.side % merge:
        raise wrong("downsample_factor", merge, f"a divisor of {siglip.side}, the patches in a row")
    return CohereConfig(
        hidden_size=part(keys, "text_config").size("hidden_size", 8192),
        siglip=dataclasses.replace(siglip, has_last_norm=not norm_eps),
        merge=merge,
        inner_size=keys.size("alignment_intermediate_size", inner_size),
        norm_eps=norm_eps,
    )


class CohereTower:
    """The tower of Command A Vision."""

    @classmethod
    def read_config(cls, keys: ConfigKeys) -> CohereConfig:
        return read_cohere(keys, 36_864)

    def __init__(self, config: CohereConfig, weights: WeightLoader) -> None:
        self.config, inner = config, config.siglip.width * config.merge**2
        self.siglip = Siglip(config.siglip, weights, tower_prefix(weights))
        name = "multi_modal_projector"
        self.norm = LayerNorm(weights, f"{name}.layernorm", inner, config.norm_eps) if config.norm_eps else None
        self.up = Affine(weights, f"{name}.linear_1", (config.inner_size, inner))
        self.down = Affine(weights, f"{name}.linear_2", (config.hidden_size, config.inner_size // 2))

    def __call__(self, image: Pixels) -> Tensor:
        """The embeddings of an image, tile by tile."""
        x_BND = self.siglip(normalised(image.pixels, image.mean, image.deviation))
        windows = merged(x_BND, self.config.merge)
        value, gate = self.up(windows if self.norm is None else self.norm(windows)).chunk(2, dim=-1)
        return self.down(functional.silu(gate) * value).flatten(0, 1)


class AyaTower(CohereTower):
    """The tower of Aya Vision."""

    @classmethod
    def read_config(cls, keys: ConfigKeys) -> CohereConfig:
        layer, strategy = keys.get("vision_feature_layer", -1), keys.get("vision_feature_select_strategy", "full")
        if layer != -1:
            raise wrong("vision_feature_layer", layer, "-1, the last layer")
        if strategy != "full":
            raise wrong("vision_feature_select_strategy", strategy, "full")
        wide = part(keys, "text_config").size("hidden_size", 4096)
        return read_cohere(keys, wide, keys.number("adapter_layer_norm_eps", 1e-6))
