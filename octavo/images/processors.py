"""What a model's checkpoint says of its images: how they are resized, and what stands for them in a prompt."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.errors import CheckpointError
from octavo.text.conversation import ImageText
from octavo.types import ImageInput

CLIP_MEAN, CLIP_DEVIATION = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
HALF, ZEROS, ONES = (0.5,) * 3, (0.0,) * 3, (1.0,) * 3
TOKENS = "added_tokens"
"""Where a family finds the ids of added tokens next to the configuration."""
GLM_SIZE = {"shortest_edge": 112 * 112, "longest_edge": 28 * 28 * 15_000}
LOW_SIDE = 512
LOW_PIXELS = 512 * 512
"""Most pixels of an image with ``detail`` low, where the model takes images of any size."""
LOW_SQUARES = 70
"""The smallest number of embeddings for which Gemma 4 was trained."""
MOST_PIXELS = 40_000_000
"""Most pixels of a file, which is decoded as a whole."""


@dataclass(frozen=True)
class PreparedImage:
    """A resized image."""

    shape: tuple[int, int, int]
    details: tuple[int, ...]
    pixels: bytes


@dataclass(frozen=True, kw_only=True)
class ImageProcessor:
    """See the module's docstring. ``settings`` are those of ``images.image_decoder.prepared``."""

    settings: Mapping[str, Any]
    mean: tuple[float, ...]
    deviation: tuple[float, ...]
    placeholder: str
    """What the chat template writes for an image."""
    around: tuple[str, str] = ("", "")
    """What the template writes next to it."""
    before: str = ""
    after: str = ""
    """Text that the processor puts around what stands for an image."""
    token: int
    """Id of the token at each embedding's position."""
    token_text: str
    """Its text in the vocabulary."""
    side: int = 0
    """Pixels of the side of an embedding, where images differ in size."""
    has_grid: bool = False
    """Whether rotary positions count rows and columns."""
    row_end: int | None = None
    """Id of a token behind each row of embeddings but the last."""
    end: int | None = None
    """Id of a token behind the last row."""
    num_tokens: int = 0
    """Embeddings of an image, where all have as many."""

    @property
    def most_tokens(self) -> int:
        """Embeddings of the largest image, where that is a setting; else 0."""
        return self.num_tokens or (self.settings["most"] if self.settings["rule"] == "squares" else 0)

    @property
    def image_text(self) -> ImageText:
        """How prompts have images."""
        return ImageText(self.placeholder, self.written, f"{self.around[0]}{self.written}{self.around[1]}")

    @property
    def written(self) -> str:
        """What the model reads in place of the placeholder, with one token for all embeddings of an image."""
        return f"{self.before}{self.token_text}{self.after}"

    def settings_for(self, detail: str) -> dict[str, Any]:
        """The settings for a client's ``detail``."""
        settings = dict(self.settings)
        if detail == "low" and settings["rule"] == "area":
            settings["most"] = max(settings["least"], min(settings["most"], LOW_PIXELS))
        if detail == "low" and settings["rule"] == "longest":
            settings["longest"] = min(settings["longest"], LOW_SIDE)
        if detail == "low" and settings["rule"] == "squares":
            settings["most"] = min(settings["most"], LOW_SQUARES)
        return settings

    def limited(self, most_tokens: int) -> ImageProcessor:
        """A processor whose images have no more than so many tokens, as far as their size can be chosen."""
        settings = dict(self.settings)
        if settings["rule"] == "area":
            settings["most"] = min(settings["most"], most_tokens * settings["factor"] ** 2)
        elif settings["rule"] == "longest":
            settings["longest"] = min(settings["longest"], math.isqrt(most_tokens) * settings["factor"])
        elif settings["rule"] == "squares":
            settings["most"] = min(settings["most"], most_tokens)
        return dataclasses.replace(self, settings=settings)

    def tokens(self, image: PreparedImage) -> list[int]:
        """The ids that stand for an image."""
        if self.num_tokens:
            return [self.token] * self.num_tokens
        rows, columns = self._grid(image)
        if self.row_end is None or self.end is None:
            return [self.token] * (rows * columns)
        return [*([*[self.token] * columns, self.row_end] * rows)[:-1], self.end]

    def placed(self, image: PreparedImage, start: int) -> ImageInput:
        """An image whose first token is at ``start``."""
        grid = self._grid(image) if self.has_grid else None
        known = json.dumps([dict(self.settings), self.mean, self.deviation, image.shape, image.details], sort_keys=True)
        digest = hashlib.sha256(known.encode() + b"\0" + image.pixels).digest()
        num_tokens = len(self.tokens(image))
        return ImageInput(start, num_tokens, self.token, digest, image.shape, image.pixels, image.details, grid)

    def _grid(self, image: PreparedImage) -> tuple[int, int]:
        """Rows and columns of embeddings."""
        return image.shape[1] // self.side, image.shape[2] // self.side


def read_processor(folder: Path) -> ImageProcessor | None:
    """The processor of the checkpoint in a folder; ``None`` if it takes no images, or is of no known family.

    Raises ``CheckpointError`` naming what is missing or wrong.
    """
    config = _read(folder / "config.json")
    names = config.get("architectures") or [None]
    make = PROCESSORS.get(str(names[0]))
    if make is None or not config.get("vision_config"):
        return None
    given = _read(folder / "processor_config.json").get("image_processor") or _read(folder / "preprocessor_config.json")
    try:
        return make({**config, TOKENS: _added_tokens(folder)}, given)
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{folder}: the image processor cannot be read: {error!r}") from None


def _added_tokens(folder: Path) -> dict[str, int]:
    """Ids of added tokens by their text."""
    given = _read(folder / "tokenizer.json").get("added_tokens")
    return {token["content"]: token["id"] for token in given} if isinstance(given, list) else {}


def _read(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}


def _scaling(given: Mapping[str, Any], mean: tuple[float, ...], deviation: tuple[float, ...]) -> dict[str, Any]:
    if given.get("do_normalize") is False:
        return {"mean": ZEROS, "deviation": ONES}
    return {
        "mean": tuple(map(float, given.get("image_mean") or mean)),
        "deviation": tuple(map(float, given.get("image_std") or deviation)),
    }


def _qwen(config: Mapping[str, Any], given: Mapping[str, Any], patch: int, scaling: dict[str, Any]) -> ImageProcessor:
    inner = config["vision_config"]
    side = int(inner.get("patch_size", patch)) * int(inner.get("spatial_merge_size", 2))
    size = given.get("size") or {}
    least = given.get("min_pixels") or size.get("shortest_edge") or 56 * 56
    most = given.get("max_pixels") or size.get("longest_edge") or 28 * 28 * 1280
    return ImageProcessor(
        settings={"rule": "area", "factor": side, "least": int(least), "most": int(most), "resample": 3}
        | {"most_pixels": MOST_PIXELS},
        placeholder="<|image_pad|>",
        around=("<|vision_start|>", "<|vision_end|>"),
        token=int(config.get("image_token_id") or config[TOKENS].get("<|image_pad|>", 151_655)),
        token_text="<|image_pad|>",
        side=side,
        has_grid=True,
        **scaling,
    )


def _qwen25(config: Mapping[str, Any], given: Mapping[str, Any]) -> ImageProcessor:
    return _qwen(config, given, 14, _scaling(given, CLIP_MEAN, CLIP_DEVIATION))


def _qwen3(config: Mapping[str, Any], given: Mapping[str, Any]) -> ImageProcessor:
    return _qwen(config, given, 16, _scaling(given, HALF, HALF))


def _glm4v(config: Mapping[str, Any], given: Mapping[str, Any]) -> ImageProcessor:
    found = _qwen(config, {"size": GLM_SIZE, **given}, 14, _scaling(given, CLIP_MEAN, CLIP_DEVIATION))
    halves = {key: found.settings[key] // 2 for key in ("least", "most")}  # as an image counts as two frames
    return dataclasses.replace(
        found,
        settings={**found.settings, **halves, "grows": True},
        placeholder="<|image|>",
        around=("<|begin_of_image|>", "<|end_of_image|>"),
        token=int(config.get("image_token_id") or config[TOKENS].get("<|image|>", 151_343)),
        token_text="<|image|>",
    )


def _gemma3(config: Mapping[str, Any], given: Mapping[str, Any]) -> ImageProcessor:
    side = int(config["vision_config"].get("image_size", 896))
    size = given.get("size") or {}
    return ImageProcessor(
        settings={"rule": "fixed", "height": int(size.get("height", side)), "width": int(size.get("width", side))}
        | {"resample": int(given.get("resample", 2)), "most_pixels": MOST_PIXELS},
        placeholder="<start_of_image>",
        before="\n\n<start_of_image>",
        after="<end_of_image>\n\n",
        token=int(config.get("image_token_id", config.get("image_token_index", 262_144))),
        token_text="<image_soft_token>",
        num_tokens=int(config.get("mm_tokens_per_image", 256)),
        **_scaling(given, HALF, HALF),
    )


def _gemma4(config: Mapping[str, Any], given: Mapping[str, Any]) -> ImageProcessor:
    inner, pool = config["vision_config"], int(given.get("pooling_kernel_size", 3))
    texts = {number: text for text, number in config[TOKENS].items()}
    token = int(config.get("image_token_id") or 258_880)
    side = int(given.get("patch_size", inner.get("patch_size", 16))) * pool
    is_scaled = config["architectures"][0] == "Gemma4ForConditionalGeneration"  # by the tower itself
    return ImageProcessor(
        settings={"rule": "squares", "factor": side, "most": int(given.get("max_soft_tokens", 280))}
        | {"resample": int(given.get("resample", 3)), "most_pixels": MOST_PIXELS},
        placeholder=texts.get(token, "<|image|>"),
        before=texts.get(config.get("boi_token_id"), "<|image>"),
        after=texts.get(config.get("eoi_token_id"), "<image|>"),
        token=token,
        token_text=texts.get(token, "<|image|>"),
        side=side,
        mean=HALF if is_scaled else ZEROS,
        deviation=HALF if is_scaled else ONES,
    )


def _mistral3(config: Mapping[str, Any], given: Mapping[str, Any]) -> ImageProcessor:
    inner = config["vision_config"]
    side = int(inner.get("patch_size", 14)) * int(config.get("spatial_merge_size", 2))
    longest = int((given.get("size") or {}).get("longest_edge") or inner.get("image_size", 1540))
    return ImageProcessor(
        settings={"rule": "longest", "longest": longest, "factor": side, "resample": int(given.get("resample", 3))}
        | {"most_pixels": MOST_PIXELS},
        placeholder="[IMG]",
        token=int(config.get("image_token_id", config.get("image_token_index", 10))),
        token_text="[IMG]",
        side=side,
        row_end=int(config[TOKENS].get("[IMG_BREAK]", 12)),
        end=int(config[TOKENS].get("[IMG_END]", 13)),
        **_scaling(given, CLIP_MEAN, CLIP_DEVIATION),
    )


PROCESSORS = {
    "Gemma3ForConditionalGeneration": _gemma3,
    "Gemma4ForConditionalGeneration": _gemma4,
    "Gemma4UnifiedForConditionalGeneration": _gemma4,
    "Glm46VForConditionalGeneration": _glm4v,
    "Glm4vForConditionalGeneration": _glm4v,
    "Glm4vMoeForConditionalGeneration": _glm4v,
    "Mistral3ForConditionalGeneration": _mistral3,
    "Qwen2VLForConditionalGeneration": _qwen25,
    "Qwen2_5_VLForConditionalGeneration": _qwen25,
    "Qwen3VLForConditionalGeneration": _qwen3,
    "Qwen3VLMoeForConditionalGeneration": _qwen3,
    "Qwen3_5ForConditionalGeneration": _qwen3,
    "Qwen3_5MoeForConditionalGeneration": _qwen3,
}
"""By architecture of the checkpoint."""
