"""What the checkpoints of families say whose images are cut into tiles that tokens separate, by family."""

from __future__ import annotations

import logging
import string
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from octavo.images.pixel_scaling import CLIP_DEVIATION, CLIP_MEAN, HALF, TOKENS, scaling
from octavo.images.processors import (
    LFM_PLACE,
    LFM_WHOLE,
    LINE,
    LLAMA4_MARKS,
    NUMBER_MARKS,
    SLICE_MARKS,
    TILE_END,
    ImageProcessor,
    by_tile,
    in_ended,
    in_named,
    in_places,
    in_separated,
    in_slices,
    in_two_views,
    in_views,
)
from octavo.images.resizing import most_in_slice

logger = logging.getLogger(__name__)

Maker = Callable[[Mapping[str, Any], Mapping[str, Any]], ImageProcessor | None]


def _side_of(config: Mapping[str, Any], given: Mapping[str, Any], side: int, merge: int, patch: int) -> tuple[int, int]:
    """Pixels of a tile's side, and its embeddings; ``side`` and ``patch`` are the family's defaults."""
    inner = config["vision_config"]
    side = int((given.get("size") or {}).get("height") or inner.get("image_size", side))
    return side, (-(-(side // int(inner.get("patch_size", patch))) // merge)) ** 2  # GOT-OCR 2 rounds up


def _cohere(config: Mapping[str, Any], given: Mapping[str, Any]) -> ImageProcessor | None:
    if (found := tokens_around(config, [TILE_END])) is None:
        return None
    side, count = _side_of(config, given, 512, int(config.get("downsample_factor", 2)), 16)
    splits = given.get("crop_to_patches") is not False
    settings = {"rule": "canvas", "side": side, "height": side, "width": side, "tokens": count + 1, "least": 1}
    settings |= {"most": int(given.get("max_patches") or 12) if splits else 1}
    return ImageProcessor(
        settings=settings | {"resample": int(given.get("resample", 3))},
        placeholder="<|IMG_PATCH|>",
        before="<|START_OF_IMG|>",
        after="<|END_OF_IMG|>",
        token=int(config.get("image_token_id") or 255_036),
        num_tokens=count,
        vocabulary=found,
        layout=in_ended,
        **scaling(given, CLIP_MEAN, CLIP_DEVIATION),
    )


def tokens_around(config: Mapping[str, Any], names: Sequence[str]) -> dict[str, int] | None:
    """Ids of tokens around tiles; ``None`` if the vocabulary lacks any, as of a model that was trained for text."""
    if missing := [name for name in names if name not in config[TOKENS]]:
        logger.warning("images are refused: the vocabulary has no %s", ", ".join(missing))
        return None
    return {name: config[TOKENS][name] for name in names}


def _aya(config: Mapping[str, Any], given: Mapping[str, Any]) -> ImageProcessor | None:
    side, count = _side_of(config, given, 364, int(config.get("downsample_factor", 2)), 14)
    least, most = int(given.get("min_patches") or 1), int(given.get("max_patches") or 12)
    found = tokens_around(config, [*(f"TILE_{number}" for number in range(1, most + 1)), "TILE_GLOBAL"])
    if found is None:
        return None
    settings = {"rule": "grid", "height": side, "width": side, "tokens": count + 1, "least": least, "most": most}
    return ImageProcessor(
        settings=settings | {"resample": int(given.get("resample", 3))},
        placeholder="<image>",
        before="<|START_OF_IMG|>",
        after="<|END_OF_IMG|>",
        token=int(config.get("image_token_index") or config.get("image_token_id") or 255_036),
        token_text="<|IMG_PATCH|>",
        num_tokens=count,
        vocabulary=found,
        layout=in_named,
        **scaling(given, CLIP_MEAN, CLIP_DEVIATION),
    )


def _got_ocr2(config: Mapping[str, Any], given: Mapping[str, Any]) -> ImageProcessor:
    side, count = _side_of(config, given, 1024, 4, 16)
    least, most = int(given.get("min_patches") or 1), int(given.get("max_patches") or 12)
    if not given.get("crop_to_patches"):
        least = most = 1
    settings = {"rule": "grid", "height": side, "width": side, "tokens": count, "least": least, "most": most}
    return ImageProcessor(
        settings=settings | {"resample": int(given.get("resample", 3))},
        placeholder="<imgpad>",
        around=("<img>", "</img>"),
        token=int(config.get("image_token_index") or config.get("image_token_id") or 151_859),
        num_tokens=count,
        layout=by_tile,
        **scaling(given, CLIP_MEAN, CLIP_DEVIATION),
    )


def _llama4(config: Mapping[str, Any], given: Mapping[str, Any]) -> ImageProcessor | None:
    if (found := tokens_around(config, LLAMA4_MARKS)) is None:
        return None
    merge = round(1 / float(config["vision_config"].get("pixel_shuffle_ratio", 0.5)))
    side, count = _side_of(config, given, 336, merge, 14)
    settings = {"rule": "fitted", "side": side, "tokens": count + 1, "least": 1}
    settings |= {"most": int(given.get("max_patches") or 16), "largest": bool(given.get("resize_to_max_canvas"))}
    return ImageProcessor(
        settings=settings | {"resample": int(given.get("resample", 2))},
        placeholder="<|image|>",
        before="<|image_start|>",
        after="<|image_end|>",
        token=int(config.get("image_token_index") or config.get("image_token_id") or 200_092),
        token_text="<|patch|>",
        num_tokens=count,
        vocabulary=found,
        layout=in_separated,
        **scaling(given, HALF, HALF),
    )


def _deepseek_vl2(config: Mapping[str, Any], given: Mapping[str, Any]) -> ImageProcessor:
    inner, projector = config["vision_config"], config.get("projector_config") or {}
    side, merge = int(inner.get("image_size", 384)), int(projector.get("downsample_ratio", 2))
    sizes = config.get("candidate_resolutions") or given.get("candidate_resolutions") or [[side, side]]
    scaled = scaling(given, HALF, HALF)
    settings = {"rule": "padded pinpoints", "side": side, "pinpoints": [[height, width] for width, height in sizes]}
    cells = -(-(side // int(inner.get("patch_size", 14))) // merge)
    settings |= {"cells": cells, "between": cells + 1, "most": 0, "resample": 3}
    return ImageProcessor(
        settings=settings | {"grey": [int(mean * 255) for mean in scaled["mean"]]},
        placeholder="<image>",
        token=int(config[TOKENS]["<image>"]),
        most_in_tiles=2,
        layout=in_two_views,
        **scaled,
    )


def _deepseek_ocr(config: Mapping[str, Any], given: Mapping[str, Any]) -> ImageProcessor:
    """Both versions; what only code says in DeepSeek's own repositories is the default here."""
    is_second = "2" in config["architectures"][0]
    scaled, cell, ends = scaling(given, HALF, HALF), 4 * int(given.get("patch_size") or 16), 0 if is_second else 1
    side = int((given.get("size") or {}).get("height") or config["vision_config"].get("image_size") or 1024)
    tile = int(given.get("tile_size") or (768 if is_second else 640))
    least, most = int(given.get("min_patches") or 2), int(given.get("max_patches") or (6 if is_second else 9))
    if given.get("crop_to_patches") is False:
        side, most = tile if is_second else side, 0
    cells, whole = tile // cell, side // cell
    settings = {"rule": "views", "side": side, "height": tile, "width": tile, "least": least, "most": most}
    settings |= {"cells": cells, "line_end": ends, "tokens": cells * (cells + ends)}
    settings |= {"whole": whole * (whole + ends) + 1, "resample": int(given.get("resample", 3))}
    grey = given.get("background_color") or [int(mean * 255) for mean in scaled["mean"]]
    return ImageProcessor(
        settings=settings | {"grey": [int(number) for number in grey]},
        placeholder="<image>",
        token=int(config.get("image_token_id") or config[TOKENS]["<image>"]),
        layout=in_views,
        **scaled,
    )


def _lfm2(config: Mapping[str, Any], given: Mapping[str, Any]) -> ImageProcessor | None:
    if given.get("use_thumbnail") is False:
        raise ValueError("use_thumbnail is false")
    merge, patch = int(given.get("downsample_factor") or 2), int(given.get("encoder_patch_size") or 16)
    tile, factor = int(given.get("tile_size") or 512), merge * patch
    least, most = int(given.get("min_tiles") or 2), int(given.get("max_tiles") or 10)
    if given.get("do_image_splitting") is False:
        least = most = 1
    counts = (given.get("min_image_tokens") or 64, given.get("max_image_tokens") or 256)
    areas = {end: int(count) * factor**2 for end, count in zip(("least", "most"), counts, strict=True)}
    settings = {"rule": "parts", "height": tile, "width": tile, "least": least, "most": most, "merge": merge}
    settings |= {"whole": {"rule": "area", "factor": factor, "shortest": factor, **areas}}
    settings |= {"tolerance": float(given.get("max_pixels_tolerance") or 2.0), "tokens": (tile // factor) ** 2}
    places = [LFM_PLACE.format(row, column) for row in range(1, most + 1) for column in range(1, most // row + 1)]
    if (found := tokens_around(config, [*places, LFM_WHOLE])) is None:
        return None
    return ImageProcessor(
        settings=settings | {"resample": int(given.get("resample", 2))},
        placeholder="<image>",
        before="<|image_start|>",
        after="<|image_end|>",
        token=int(config.get("image_token_id") or config.get("image_token_index") or 396),
        num_tokens=(tile // factor) ** 2,
        vocabulary=found,
        layout=in_places,
        **scaling(given, HALF, HALF),
    )


def _minicpm(config: Mapping[str, Any], given: Mapping[str, Any]) -> ImageProcessor | None:
    is_numbered = given.get("use_image_id") is not False
    names = [*SLICE_MARKS, LINE, *((*NUMBER_MARKS, *string.digits) if is_numbered else ())]
    if (found := tokens_around(config, names)) is None:
        return None
    patch = int(given.get("patch_size") or config["vision_config"].get("patch_size") or 14)
    merge = 2 if (given.get("downsample_mode") or config.get("downsample_mode")) == "4x" else 4
    side, factor = int(given.get("scale_resolution") or 448), patch * merge
    if (cells := -(-side // factor)) > 1024:
        raise ValueError(f"scale_resolution is {side}")
    settings = {"rule": "slices", "side": side, "factor": factor, "tokens": most_in_slice(cells) + 3}
    settings |= {"most": int(given.get("max_slice_nums") or 9) if given.get("slice_mode") is not False else 1}
    token = int(config.get("image_token_id") or config[TOKENS]["<|image_pad|>"])
    texts = {number: text for text, number in config[TOKENS].items()}
    return ImageProcessor(
        settings=settings | {"resample": int(given.get("resample", 3))},
        placeholder=texts.get(token, "<|image_pad|>"),
        token=token,
        vocabulary=found,
        is_numbered=is_numbered,
        layout=in_slices,
        **scaling(given, HALF, HALF),
    )


TILED: dict[str, Maker] = {
    "AyaVisionForConditionalGeneration": _aya,
    "Cohere2VisionForConditionalGeneration": _cohere,
    "DeepseekOCR2ForCausalLM": _deepseek_ocr,
    "DeepseekOCRForCausalLM": _deepseek_ocr,
    "DeepseekOcr2ForConditionalGeneration": _deepseek_ocr,
    "DeepseekVLV2ForCausalLM": _deepseek_vl2,
    "GotOcr2ForConditionalGeneration": _got_ocr2,
    "Lfm2VlForConditionalGeneration": _lfm2,
    "Llama4ForConditionalGeneration": _llama4,
    "MiniCPMV4_6ForConditionalGeneration": _minicpm,
}
"""By architecture of the checkpoint."""
