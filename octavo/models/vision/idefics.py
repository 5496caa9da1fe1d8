"""The towers of Idefics 3 (arXiv 2408.12637) and SmolVLM (arXiv 2504.05299): SigLIP, and a map of windows of patches.

Shapes: D width of the tower.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from octavo.models.config_keys import ConfigKeys, wrong
from octavo.models.loader import WeightLoader
from octavo.models.vision.parts import Affine, merged, normalised, part
from octavo.models.vision.siglip import Siglip, SiglipConfig, read_siglip
from octavo.models.vision.tower import Pixels, VisionConfig


@dataclass(frozen=True, kw_only=True)
class IdeficsConfig(VisionConfig):
    siglip: SiglipConfig
    merge: int


class Idefics3Tower:
    """See the module's docstring."""

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
