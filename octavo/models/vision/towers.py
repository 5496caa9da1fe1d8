"""Vision and audio towers by the architecture of their checkpoint."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from octavo.errors import CheckpointError
from octavo.models.audio.qwen_audio import Qwen3ASRTower, Qwen3AudioTower, Qwen25AudioTower
from octavo.models.audio.whisper import Qwen2AudioTower, VoxtralTower
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
from octavo.models.vision.tower import Pixels, Tower, VisionConfig
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
AUDIO_TOWERS: dict[str, Family] = {
    "Qwen2AudioForConditionalGeneration": Qwen2AudioTower,
    "Qwen2_5OmniForConditionalGeneration": Qwen25AudioTower,
    "Qwen2_5OmniModel": Qwen25AudioTower,
    "Qwen3ASRForConditionalGeneration": Qwen3ASRTower,
    "Qwen3OmniMoeForConditionalGeneration": Qwen3AudioTower,
    "VoxtralForConditionalGeneration": VoxtralTower,
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


class TwoTowers:
    """A tower for images and one for audio, whose embeddings have no further vectors."""

    def __init__(self, config: VisionConfig, of_images: Tower, of_audio: Tower) -> None:
        self._num_further = config.num_deep * config.hidden_size
        self._of_images, self._of_audio = of_images, of_audio

    def __call__(self, image: Pixels, /) -> Tensor:
        return (
            functional.pad(self._of_audio(image), (0, self._num_further)) if image.is_audio else self._of_images(image)
        )


def families_of(values: Mapping[str, Any]) -> list[Family]:
    """The towers of a checkpoint that are known: that of images, that of audio."""
    name = architecture(ConfigKeys(values))
    inner = values.get("vision_config")
    is_pixtral = isinstance(inner, Mapping) and inner.get("model_type") == "pixtral"
    of_images = TOWERS.get(name) if inner else None
    if name == "LlavaForConditionalGeneration" and is_pixtral:
        of_images = PixtralTower
    of_audio = AUDIO_TOWERS.get(name) if values.get("audio_config") else None
    return [family for family in (of_images, of_audio) if family is not None]


def read_vision(values: Mapping[str, Any]) -> VisionConfig | None:
    """The configuration of a checkpoint's tower, that of images if there are two; ``None`` if it has none that is
    known. Raises ``CheckpointError``."""
    configs: list[VisionConfig] = [family.read_config(ConfigKeys(values)) for family in families_of(values)]
    if not configs:
        return None
    if configs[0].hidden_size != configs[-1].hidden_size:
        sizes = f"embeddings of audio have {configs[-1].hidden_size} numbers, those of images {configs[0].hidden_size}"
        raise CheckpointError(f"audio_config: {sizes}")
    ids = (values.get(f"{kind}_token_{name}") for kind in PLACEHOLDERS for name in ("id", "index"))
    placeholders = sorted({i for i in ids if isinstance(i, int) and i >= 0})
    return dataclasses.replace(configs[0], placeholders=tuple(placeholders))


def load_tower(
    values: Mapping[str, Any], config: VisionConfig, source: TensorSource, form: WeightFormat
) -> LoadedTower:
    """Load the tower or towers, which are never quantised. Raises ``CheckpointError``."""
    names = {name.removeprefix("model."): name for name in source.names() if not name.startswith(TEXT)}
    towers = list[Tower]()
    num_parameters, bytes_by_format = 0, Counter[str]()
    for family in families_of(values):
        own = dict(names)
        for part, ours in getattr(family, "own_names", {}).items():
            own = {name.replace(part, ours): stored for name, stored in own.items()}
        weights = WeightLoader(Renamed(source, own), form)
        towers.append(family(family.read_config(ConfigKeys(values)), weights))
        num_parameters += weights.num_parameters
        bytes_by_format += weights.bytes_by_format
    tower = TwoTowers(config, *towers) if len(towers) == 2 else towers[0]
    return LoadedTower(config, tower, num_parameters, bytes_by_format)


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
