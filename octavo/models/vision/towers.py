"""Vision towers by the architecture of their checkpoint."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import torch

from octavo.errors import CheckpointError
from octavo.models.config_keys import ConfigKeys
from octavo.models.loader import WeightLoader
from octavo.models.model_config import architecture
from octavo.models.registry import CausalLM
from octavo.models.vision.cohere import AyaTower, CohereTower
from octavo.models.vision.deepseek_ocr import DeepseekOCR2Tower, DeepseekOCRTower
from octavo.models.vision.deepseek_vl2 import DeepseekVL2Tower
from octavo.models.vision.gemma4 import Gemma4Tower, Gemma4UnifiedTower
from octavo.models.vision.glm import Glm4vTower, GlmOcrTower
from octavo.models.vision.internvl import InternVLChatTower, InternVLTower, QianfanTower
from octavo.models.vision.llama4 import Llama4Tower
from octavo.models.vision.llava import LlavaNextTower, LlavaOnevisionTower, LlavaTower
from octavo.models.vision.minicpm import MiniCPMTower
from octavo.models.vision.moonvit import MoonTower
from octavo.models.vision.naflex import LfmTower, PaddleOCRTower
from octavo.models.vision.pixtral import LightOnTower, Mistral3Tower, PixtralTower
from octavo.models.vision.qwen import (
    CompassTower,
    ExaoneTower,
    Qwen2Tower,
    Qwen3OmniTower,
    Qwen3Tower,
    Qwen25OmniTower,
    Qwen25Tower,
)
from octavo.models.vision.sam import GotTower
from octavo.models.vision.siglip import Gemma3Tower, Idefics3Tower, PaliGemmaTower
from octavo.models.vision.tower import Tower, VisionConfig
from octavo.quant.checkpoint_tensors import Renamed, TensorSource
from octavo.quant.stored.stored_weight import WeightFormat


class Family(Protocol):
    """A tower's class: it reads its configuration, and is constructed from that and the weights.

    ``own_names``, if it has any: parts of weights' names in checkpoints, and what it has in their place.
    """

    def read_config(self, keys: ConfigKeys) -> Any: ...

    def __call__(self, config: Any, weights: WeightLoader) -> Tower: ...


TOWERS: dict[str, Family] = {
    "AyaVisionForConditionalGeneration": AyaTower,
    "Cohere2VisionForConditionalGeneration": CohereTower,
    "CohereCompassForConditionalGeneration": CompassTower,
    "DeepseekOCR2ForCausalLM": DeepseekOCR2Tower,
    "DeepseekOCRForCausalLM": DeepseekOCRTower,
    "DeepseekOcr2ForConditionalGeneration": DeepseekOCR2Tower,
    "DeepseekVLV2ForCausalLM": DeepseekVL2Tower,
    "Exaone4_5_ForConditionalGeneration": ExaoneTower,
    "Gemma3ForConditionalGeneration": Gemma3Tower,
    "Gemma4ForConditionalGeneration": Gemma4Tower,
    "Gemma4UnifiedForConditionalGeneration": Gemma4UnifiedTower,
    "Glm46VForConditionalGeneration": Glm4vTower,
    "Glm4vForConditionalGeneration": Glm4vTower,
    "Glm4vMoeForConditionalGeneration": Glm4vTower,
    "GlmOcrForConditionalGeneration": GlmOcrTower,
    "GotOcr2ForConditionalGeneration": GotTower,
    "Idefics3ForConditionalGeneration": Idefics3Tower,
    "InternVLChatModel": InternVLChatTower,
    "InternVLForConditionalGeneration": InternVLTower,
    "KimiK25ForConditionalGeneration": MoonTower,
    "KimiVLForConditionalGeneration": MoonTower,
    "Kimi_K25ForConditionalGeneration": MoonTower,
    "Lfm2VlForConditionalGeneration": LfmTower,
    "LightOnOCRForConditionalGeneration": LightOnTower,
    "LightOnOcrForConditionalGeneration": LightOnTower,
    "Llama4ForConditionalGeneration": Llama4Tower,
    "LlavaForConditionalGeneration": LlavaTower,
    "LlavaNextForConditionalGeneration": LlavaNextTower,
    "LlavaNextVideoForConditionalGeneration": LlavaNextTower,
    "LlavaOnevisionForConditionalGeneration": LlavaOnevisionTower,
    "MiniCPMV4_6ForConditionalGeneration": MiniCPMTower,
    "Mistral3ForConditionalGeneration": Mistral3Tower,
    "PaddleOCRVLForConditionalGeneration": PaddleOCRTower,
    "PaliGemmaForConditionalGeneration": PaliGemmaTower,
    "QianfanOCRForConditionalGeneration": QianfanTower,
    "Qwen2VLForConditionalGeneration": Qwen2Tower,
    "Qwen2_5OmniForConditionalGeneration": Qwen25OmniTower,
    "Qwen2_5OmniModel": Qwen25OmniTower,
    "Qwen2_5_VLForConditionalGeneration": Qwen25Tower,
    "Qwen3OmniMoeForConditionalGeneration": Qwen3OmniTower,
    "Qwen3VLForConditionalGeneration": Qwen3Tower,
    "Qwen3VLMoeForConditionalGeneration": Qwen3Tower,
    "Qwen3_5ForConditionalGeneration": Qwen3Tower,
    "Qwen3_5MoeForConditionalGeneration": Qwen3Tower,
    "SmolVLMForConditionalGeneration": Idefics3Tower,
}
PLACEHOLDERS = ("image", "video", "audio")
TEXT = (
    "language.",
    "language_model.",
    "model.language_model.",
    "lm_head.",
    "model.text_model.",
    "model.layers.",
    "model.embed_tokens.",
    "model.norm.",
)
"""Prefixes of weights that are not of the tower."""


class LoadedTower(NamedTuple):
    """A tower with its weights."""

    config: VisionConfig
    tower: Tower
    num_parameters: int
    bytes_by_format: Mapping[str, int]


def family_of(values: Mapping[str, Any]) -> Family | None:
    """The tower of a checkpoint, if it is known."""
    name = architecture(ConfigKeys(values))
    inner = values.get("vision_config")
    is_pixtral = isinstance(inner, Mapping) and inner.get("model_type") == "pixtral"
    if name == "LlavaForConditionalGeneration" and is_pixtral:
        return PixtralTower
    return TOWERS.get(name)


def read_vision(values: Mapping[str, Any]) -> VisionConfig | None:
    """The configuration of a checkpoint's tower; ``None`` if it has none that is known. Raises ``CheckpointError``."""
    keys = ConfigKeys(values)
    family = family_of(values)
    if family is None or not values.get("vision_config"):
        return None
    config: VisionConfig = family.read_config(keys)
    ids = (values.get(f"{kind}_token_{name}") for kind in PLACEHOLDERS for name in ("id", "index"))
    return dataclasses.replace(config, placeholders=tuple(sorted({i for i in ids if isinstance(i, int) and i >= 0})))


def load_tower(
    values: Mapping[str, Any], config: VisionConfig, source: TensorSource, form: WeightFormat
) -> LoadedTower:
    """Load a tower, which is never quantised. Raises ``CheckpointError``."""
    family = family_of(values)
    assert family is not None, "the configuration was read"
    names = {name.removeprefix("model."): name for name in source.names() if not name.startswith(TEXT)}
    for part, own in getattr(family, "own_names", {}).items():
        names = {name.replace(part, own): stored for name, stored in names.items()}
    weights = WeightLoader(Renamed(source, names), form)
    tower = family(config, weights)
    return LoadedTower(config, tower, weights.num_parameters, weights.bytes_by_format)


def connect(model: CausalLM, config: VisionConfig, form: WeightFormat) -> None:
    """Let the decoder rotate by the axes of images."""
    if config.axes:
        rotaries = getattr(model, "rotaries", None)
        if not rotaries:
            raise CheckpointError("mrope_section: this decoder has no rotary positions")
        for rotary in rotaries:
            if len(rotary.frequencies_R) != len(config.axes):
                raise CheckpointError(
                    f"mrope_section: is of {len(config.axes)} rotated pairs; heads have {len(rotary.frequencies_R)}"
                )
            rotary.axes_R = torch.tensor(config.axes, dtype=torch.int64, device=form.device)
