"""What a model's checkpoint says of its images and videos, by family."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import string
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from octavo.errors import CheckpointError
from octavo.images.audio import RATE, read_audio_form
from octavo.images.pixel_scaling import (
    CLIP_DEVIATION,
    CLIP_MEAN,
    HALF,
    IMAGENET_DEVIATION,
    IMAGENET_MEAN,
    ONES,
    TOKENS,
    VIDEO,
    ZEROS,
    scaling,
)
from octavo.images.processors import (
    AROUND_TILE,
    LINE,
    LINES,
    PIXTRAL_ENDS,
    WHOLE,
    ImageProcessor,
    by_size,
    by_tile,
    in_lines,
    in_rows,
    in_split,
    place_of,
    quarter,
)
from octavo.images.tiled_families import TILED, Maker, tokens_around
from octavo.images.videos import VideoForm
from octavo.text.tokenizers.folder_tokenizer import declared_tokens
from octavo.weights.folder import find_file, with_architecture
from octavo.weights.gguf.gguf_reader import vocabulary
from octavo.weights.gguf.projector import open_projector

logger = logging.getLogger(__name__)

LINE_TOKENS = {"Ċ": LINE, "ĊĊ": LINES}
"""By what byte-level vocabularies have for them."""
LLAVA_POINTS = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]
FEW_SLOTS = 4096
GLM_SIZE = {"shortest_edge": 112 * 112, "longest_edge": 28 * 28 * 15_000}


WITHOUT_IMAGES = ImageProcessor(settings={"rule": ""}, mean=ZEROS, deviation=ONES, placeholder="", token=-1)
"""Of a model that reads audio and no images."""


def read_processor(folder: Path) -> ImageProcessor | None:
    """The processor of the checkpoint in a folder or a GGUF file; ``None`` if it takes no images, or if its family is
    not known.

    Raises ``CheckpointError`` naming what is missing or wrong.
    """
    try:
        found = _processor(folder)
        if found is not None:  # what sizes no arithmetic goes with is known before a request comes
            found.limited(FEW_SLOTS)
            if found.audio is not None and not found.audio.count(RATE) > 0:
                raise ValueError("a second of audio has no embeddings")
        return found
    except CheckpointError:
        raise
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise CheckpointError(f"{folder}: the image processor cannot be read: {error!r}") from None


def _processor(folder: Path) -> ImageProcessor | None:
    if (projector := open_projector(folder)) is not None:
        tokens = vocabulary(folder)
        config, given = projector.config({}, tokens), projector.processing
        video: dict[str, Any] = {}
        audio = None
        known = {LINE_TOKENS.get(text, text): number for number, text in enumerate(tokens)}
    else:
        config = with_architecture(_read(folder, "config.json"))
        own, older = _read(folder, "processor_config.json"), _read(folder, "preprocessor_config.json")
        given, known = own.get("image_processor") or older, _tokens(folder)
        audio = read_audio_form(config, own.get("feature_extractor") or older, known)
        video = own.get(VIDEO) or _read(folder, "video_preprocessor_config.json")
    make = PROCESSORS.get(str((config.get("architectures") or [None])[0]))
    found = make({**config, TOKENS: known, VIDEO: video}, given) if make and config.get("vision_config") else None
    if audio is not None:
        found = dataclasses.replace(found or WITHOUT_IMAGES, audio=audio)
    if found is None:
        return None
    for key, value in (("image_mean", found.mean), ("image_std", found.deviation)):
        of_images = tuple(given.get(key) or value)
        if found.video is not None and tuple(video.get(key) or of_images) != of_images:
            logger.warning("%s: videos are refused: their %s is not that of images", folder, key)
            return dataclasses.replace(found, video=None)
    return found


def _tokens(folder: Path) -> dict[str, int]:
    """Ids of added tokens, digits and ends of lines by their text, as byte-level vocabularies have them."""
    tokenizer = _read(folder, "tokenizer.json")
    given, vocabulary = tokenizer.get("added_tokens"), (tokenizer.get("model") or {}).get("vocab")
    found = {token["content"]: token["id"] for token in given} if isinstance(given, list) else {}
    added = _read(folder, "added_tokens.json")
    declared = declared_tokens(_read(folder, "tokenizer_config.json"), added, folder)
    found = {**added, **{token.content: number for number, token in declared.items()}, **found}
    if isinstance(vocabulary, dict):
        found |= {line: vocabulary[text] for text, line in LINE_TOKENS.items() if text in vocabulary}
        found |= {digit: vocabulary[digit] for digit in string.digits if digit in vocabulary}
    return found


def _read(folder: Path, name: str) -> dict[str, Any]:
    path = find_file(folder, name)
    try:
        values = {} if path is None else json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}


def _qwen(config: Mapping[str, Any], given: Mapping[str, Any], patch: int, scaled: dict[str, Any]) -> ImageProcessor:
    inner = config["vision_config"]
    side = int(inner.get("patch_size", patch)) * int(inner.get("spatial_merge_size", 2))
    size = given.get("size") or {}
    least = given.get("min_pixels") or size.get("shortest_edge") or 56 * 56
    most = given.get("max_pixels") or size.get("longest_edge") or 28 * 28 * 1280
    token = config.get("image_token_id") or config.get("image_token_index")
    return ImageProcessor(
        settings={"rule": "area", "factor": side, "least": int(least), "most": int(most), "resample": 3},
        placeholder="<|image_pad|>",
        around=("<|vision_start|>", "<|vision_end|>"),
        token=int(token or config[TOKENS].get("<|image_pad|>", 151_655)),
        side=side,
        has_grid=True,
        **scaled,
    )


def _video_settings(video: Mapping[str, Any], factor: int, least: int, most: int, **more: Any) -> dict[str, Any]:
    """Those of videos whose frames have any size."""
    size = video.get("size") or {}
    least, most = int(size.get("shortest_edge") or least), int(size.get("longest_edge") or most)
    return {
        "rule": "area",
        "factor": factor,
        "least": least,
        "most": most,
        "resample": 3,
        "fps": float(video.get("fps") or 2),
        "least_frames": int(video.get("min_frames") or 4),
        "most_frames": int(video.get("max_frames") or 768),
        **more,
    }


def _qwen25(config: Mapping[str, Any], given: Mapping[str, Any]) -> ImageProcessor:
    found = _qwen(config, given, 14, scaling(given, CLIP_MEAN, CLIP_DEVIATION))
    area, inner = found.side**2, config["vision_config"]
    rate = 0 if config["architectures"][0] == "Qwen2VLForConditionalGeneration" else inner.get("tokens_per_second", 4)
    total = {"total": int(128_000 * area * 0.9), "sampling": "rate", "multiple": 2}
    video = VideoForm(
        settings=_video_settings(config[VIDEO], found.side, 128 * area, 768 * area, **total),
        placeholder="<|vision_start|><|video_pad|><|vision_end|>",
        before="<|vision_start|>",
        each="{token}",
        after="<|vision_end|>",
        group=2,
        rope_rate=float(rate),
    )
    return dataclasses.replace(found, video=video)


def _qwen3(config: Mapping[str, Any], given: Mapping[str, Any]) -> ImageProcessor:
    found = _qwen(config, given, 16, scaling(given, HALF, HALF))
    area, more = found.side**2, {"sampling": "rate", "grows": True}
    video = VideoForm(
        settings=_video_settings(config[VIDEO], found.side, 128 * area, 768 * area, **more),
        placeholder="<|vision_start|><|video_pad|><|vision_end|>",
        each="<{seconds:.1f} seconds><|vision_start|>{token}<|vision_end|>",
        group=2,
        is_middle=True,
    )
    return dataclasses.replace(found, video=video)


def _compass(config: Mapping[str, Any], given: Mapping[str, Any]) -> ImageProcessor:
    """As Qwen3-VL, by other words."""
    return dataclasses.replace(
        _qwen(config, given, 16, scaling(given, CLIP_MEAN, CLIP_DEVIATION)),
        placeholder="<|IMAGE_PAD|>",
        around=("<|VISION_START|>", "<|VISION_END|>"),
        token=int(config.get("image_token_id") or config[TOKENS].get("<|IMAGE_PAD|>", 255_031)),
    )


def _qwen25_omni(config: Mapping[str, Any], given: Mapping[str, Any]) -> ImageProcessor:
    """Its vocabulary has other texts for the ids of Qwen2.5-VL."""
    found, texts = _qwen25(config, given), {number: text for text, number in config[TOKENS].items()}
    text = texts.get(found.token, found.placeholder)
    begin = texts.get(config.get("vision_start_token_id", 151_652), found.around[0])
    end = texts.get(config.get("vision_end_token_id", 151_653), found.around[1])
    return dataclasses.replace(found, video=None, placeholder=text, around=(begin, end))


def _qwen3_omni(config: Mapping[str, Any], given: Mapping[str, Any]) -> ImageProcessor:
    return _qwen(config, given, 16, scaling(given, HALF, HALF))


def _glm4v(config: Mapping[str, Any], given: Mapping[str, Any]) -> ImageProcessor:
    found = _qwen(config, {"size": GLM_SIZE, **given}, 14, scaling(given, CLIP_MEAN, CLIP_DEVIATION))
    is_newer, video = config["architectures"][0] == "Glm46VForConditionalGeneration", config[VIDEO]
    more = {"sampling": "duration" if is_newer else "seconds", "longest": video.get("max_duration") or 300}
    more |= {"most_frames": 640, "grows": True}
    time = "{seconds:.1f} seconds" if is_newer else "{whole}"
    if given.get("patch_expand_factor") not in (None, 1):
        found_factor = given["patch_expand_factor"]
        raise CheckpointError(f"image processor: patch_expand_factor is {found_factor!r}; it must be 1")
    made = dataclasses.replace(
        found,
        settings={**found.settings, "num_frames": 2, "group": 2, "grows": True},
        placeholder="<|image|>",
        around=("<|begin_of_image|>", "<|end_of_image|>"),
        token=int(config.get("image_token_id") or config[TOKENS].get("<|image|>", 151_343)),
        video=VideoForm(
            settings=_video_settings(video, found.side, 112 * 112, 28 * 28 * 60_000, **more),
            placeholder="<|begin_of_video|><|video|><|end_of_video|>",
            before="<|begin_of_video|>",
            each="<|begin_of_image|>{token}<|end_of_image|>" + time,
            after="<|end_of_video|>",
            group=2,
        ),
    )
    if config.get("model_type") == "glmga":  # which samples frames in another way
        return dataclasses.replace(made, video=None)
    return made


def _exaone(config: Mapping[str, Any], given: Mapping[str, Any]) -> ImageProcessor:
    """As Qwen2-VL, without positions of rows and columns in the decoder."""
    return dataclasses.replace(_qwen(config, given, 14, scaling(given, CLIP_MEAN, CLIP_DEVIATION)), has_grid=False)


def _paddleocr(config: Mapping[str, Any], given: Mapping[str, Any]) -> ImageProcessor:
    sizes = {"size": {"shortest_edge": 384 * 384, "longest_edge": 1536 * 1536}, **given}
    found = _qwen(config, sizes, 14, scaling(given, CLIP_MEAN, CLIP_DEVIATION))
    return dataclasses.replace(
        found,
        settings={**found.settings, "rounds": True},
        placeholder="<|IMAGE_PLACEHOLDER|>",
        around=("<|IMAGE_START|>", "<|IMAGE_END|>"),
        token=int(config.get("image_token_id") or 100_295),
    )


def _gemma3(config: Mapping[str, Any], given: Mapping[str, Any]) -> ImageProcessor:
    side = int(config["vision_config"].get("image_size", 896))
    size = given.get("size") or {}
    return ImageProcessor(
        settings={"rule": "fixed", "height": int(size.get("height", side)), "width": int(size.get("width", side))}
        | {"resample": int(given.get("resample", 2))},
        placeholder="<start_of_image>",
        before="\n\n<start_of_image>",
        after="<end_of_image>\n\n",
        token=int(config.get("image_token_id", config.get("image_token_index", 262_144))),
        token_text="<image_soft_token>",
        num_tokens=int(config.get("mm_tokens_per_image", 256)),
        layout=by_tile,
        **scaling(given, HALF, HALF),
    )


def _paligemma(config: Mapping[str, Any], given: Mapping[str, Any]) -> ImageProcessor:
    inner, size = config["vision_config"], given.get("size") or {}
    side = int(inner.get("image_size", 224))
    settings = {"rule": "fixed", "height": int(size.get("height", side)), "width": int(size.get("width", side))}
    return ImageProcessor(
        settings=settings | {"resample": int(given.get("resample", 3))},
        placeholder="<image>",
        after="<bos>",
        token=int(config.get("image_token_index") or config.get("image_token_id") or 256_000),
        num_tokens=(side // int(inner.get("patch_size", 14))) ** 2,
        vocabulary={"<bos>": int(config[TOKENS].get("<bos>", 2))},
        is_prefix=True,
        layout=by_tile,
        **scaling(given, HALF, HALF),
    )


def _gemma4(config: Mapping[str, Any], given: Mapping[str, Any]) -> ImageProcessor:
    inner, pool = config["vision_config"], int(given.get("pooling_kernel_size", 3))
    texts = {number: text for text, number in config[TOKENS].items()}
    token = int(config.get("image_token_id") or 258_880)
    side = int(given.get("patch_size", inner.get("patch_size", 16))) * pool
    is_scaled = config["architectures"][0] == "Gemma4ForConditionalGeneration"  # by the tower itself
    before, after = texts.get(config.get("boi_token_id"), "<|image>"), texts.get(config.get("eoi_token_id"), "<image|>")
    settings = {"rule": "squares", "factor": side, "most": int(given.get("max_soft_tokens", 280))}
    settings |= {"resample": int(given.get("resample", 3))}
    most = int(config[VIDEO].get("max_soft_tokens") or 70)
    sampling = {"sampling": "starts", "fps": 0, "most_frames": int(config[VIDEO].get("num_frames") or 32)}
    return ImageProcessor(
        settings=settings,
        video=VideoForm(
            settings=settings | sampling | {"most": most},
            placeholder=texts.get(config.get("video_token_id"), "<|video|>"),
            each="{clock} " + before + "{token}" + after,
            between=" ",
            num_tokens=most,
        ),
        placeholder=texts.get(token, "<|image|>"),
        before=before,
        after=after,
        token=token,
        side=side,
        mean=HALF if is_scaled else ZEROS,
        deviation=HALF if is_scaled else ONES,
    )


def _mistral3(config: Mapping[str, Any], given: Mapping[str, Any]) -> ImageProcessor:
    inner = config["vision_config"]
    side = int(inner.get("patch_size", 14)) * int(config.get("spatial_merge_size", 2))
    longest = int((given.get("size") or {}).get("longest_edge") or inner.get("image_size", 1540))
    return ImageProcessor(
        settings={"rule": "longest", "longest": longest, "factor": side, "resample": int(given.get("resample", 3))},
        placeholder="[IMG]",
        token=int(config.get("image_token_id", config.get("image_token_index", 10))),
        side=side,
        vocabulary=dict(zip(PIXTRAL_ENDS, (12, 13), strict=True))
        | {end: int(config[TOKENS][end]) for end in PIXTRAL_ENDS if end in config[TOKENS]},
        layout=in_rows,
        **scaling(given, CLIP_MEAN, CLIP_DEVIATION),
    )


def _lighton(config: Mapping[str, Any], given: Mapping[str, Any]) -> ImageProcessor:
    found, patch = _mistral3(config, given), given.get("patch_size") or {}
    factor = int(patch.get("height") or found.side) if isinstance(patch, Mapping) else int(patch)
    return dataclasses.replace(
        found,
        settings={**found.settings, "factor": factor, "side": found.side},
        placeholder="<|image_pad|>",
        token=int(config.get("image_token_id") or 151_655),
        layout=by_size,
    )


def _kimi(config: Mapping[str, Any], given: Mapping[str, Any]) -> ImageProcessor:
    """Kimi-VL, Kimi K2.5 and what transformers makes of the latter, with three names for each number."""
    given, patch = given.get("media_proc_cfg") or given, int(config["vision_config"].get("patch_size", 14))
    side = patch * int((config["vision_config"].get("merge_kernel_size") or [2])[0])
    most = given.get("in_patch_limit") or given.get("in_token_limit") or given.get("max_patches") or 4096
    longest = given.get("patch_limit_on_one_side") or (given.get("size") or {}).get("max_height") or 512
    settings = {"rule": "padded", "patch": patch, "factor": side, "most": int(most), "longest": int(longest)}
    settings |= {"resample": 3}
    video = None
    if config["architectures"][0] != "KimiVLForConditionalGeneration":
        of_frame = given.get("in_patch_limit_each_frame") or config[VIDEO].get("max_patches") or 4096
        sampling = {"sampling": "starts", "fps": float(given.get("sample_fps") or config[VIDEO].get("fps") or 2)}
        video = VideoForm(
            settings=settings | sampling | {"most": min(int(most), int(of_frame)), "most_frames": 2048},
            placeholder="<|kimi_k25_video_placeholder|>",
            each="{stamp}<|media_begin|>video<|media_content|>{token}<|media_end|>",
            group=int(given.get("temporal_merge_kernel_size") or config[VIDEO].get("temporal_patch_size") or 4),
            fills_groups=False,
        )
    return ImageProcessor(
        settings=settings,
        video=video,
        placeholder="<|media_pad|>",
        token=int(config.get("media_placeholder_token_id") or config.get("image_token_id") or 163_605),
        side=side,
        **scaling(given, HALF, HALF),
    )


def _pair(given: Any) -> tuple[int, int]:
    """Height and width, given as one number or two."""
    height, width = given if isinstance(given, list) else (given, given)
    return int(height), int(width)


def _internvl(config: Mapping[str, Any], given: Mapping[str, Any]) -> ImageProcessor:
    inner, size = config["vision_config"], given.get("size") or {}
    height, width = _pair(config.get("force_image_size") or inner.get("image_size", 448))
    if isinstance(size, Mapping):
        height, width = int(size.get("height", height)), int(size.get("width", width))
    merged = _pair(inner.get("patch_size", 14))[0] / float(config.get("downsample_ratio", 0.5))
    count = int(config.get("image_seq_length") or (height // merged) * (width // merged))
    least = given.get("min_patches", config.get("min_dynamic_patch", 1))
    most = given.get("max_patches", config.get("max_dynamic_patch", 12))
    if config.get("use_thumbnail") is False or config.get("dynamic_image_size") is False:
        most = 1
    video = config[VIDEO]
    frame = {"rule": "fixed", "height": height, "width": width} | dict(video.get("size") or {})
    frame |= {"sampling": "middles", "most_frames": int(video.get("num_frames") or 8)}
    return ImageProcessor(
        settings={"rule": "grid", "height": height, "width": width, "least": int(least), "most": int(most)}
        | {"tokens": count, "resample": int(given.get("resample", 3))},
        placeholder="<IMG_CONTEXT>",
        before="<img>",
        after="</img>",
        token=int(config.get("image_token_id") or config[TOKENS].get("<IMG_CONTEXT>", 151_667)),
        num_tokens=count,
        layout=by_tile,
        video=VideoForm(
            settings=frame | {"resample": 3},
            placeholder="<video>",
            each="Frame{number}: <img>{token}</img>",
            between="\n",
            num_tokens=count,
        ),
        **scaling(given, IMAGENET_MEAN, IMAGENET_DEVIATION),
    )


def _llava(config: Mapping[str, Any], given: Mapping[str, Any]) -> ImageProcessor:
    inner = config["vision_config"]
    if inner.get("model_type") == "pixtral":
        return _mistral3({"spatial_merge_size": 1, **config}, given)
    side = int((given.get("crop_size") or {}).get("height") or inner.get("image_size", 336))
    token = int(config.get("image_token_index") or config.get("image_token_id") or 32_000)
    texts = {number: text for text, number in config[TOKENS].items()}
    return ImageProcessor(
        settings={"rule": "middle", "side": side, "resample": int(given.get("resample", 3))},
        placeholder="<image>",
        token=token,
        token_text=texts.get(token, "<image>"),
        num_tokens=(side // int(inner.get("patch_size", 14))) ** 2,
        layout=by_tile,
        **scaling(given, CLIP_MEAN, CLIP_DEVIATION),
    )


def _llava_next(config: Mapping[str, Any], given: Mapping[str, Any], side: int = 336, most: int = 0) -> ImageProcessor:
    """``side``: of a tile by default. ``most``: whole tiles whose number of embeddings an image has at most, 0: any."""
    found, inner = _llava(config, given), config["vision_config"]
    side = int(inner.get("image_size", side))
    cells = side // int(inner.get("patch_size", 14))
    points = given.get("image_grid_pinpoints") or config.get("image_grid_pinpoints")
    if points is None and most:
        points = [[rows * side, columns * side] for rows in range(1, 7) for columns in range(1, 7)]
    known = {"rule": "pinpoints", "side": side, "cells": cells, "most": most, "pinpoints": points or LLAVA_POINTS}
    return dataclasses.replace(found, settings={**found.settings, **known}, num_tokens=cells**2, layout=in_lines)


def _llava_onevision(config: Mapping[str, Any], given: Mapping[str, Any]) -> ImageProcessor:
    most = str(config.get("vision_aspect_ratio") or "anyres_max_9").removeprefix("anyres_max_")
    found, size = _llava_next(config, given, 384, int(most)), config[VIDEO].get("size") or {}
    side = found.settings["side"]
    frame = {"rule": "fixed", "height": size.get("height", side), "width": size.get("width", side), "resample": 3}
    video = VideoForm(
        settings=frame | {"sampling": "rate", "fps": 0, "least_frames": 1, "most_frames": 32},
        placeholder="<video>",
        each="{token}",
        num_tokens=quarter(found.settings["cells"]),
        details=lambda is_last: (int(is_last),),
    )
    return dataclasses.replace(found, video=video)


def _idefics3(config: Mapping[str, Any], given: Mapping[str, Any]) -> ImageProcessor | None:
    inner, known = config["vision_config"], config[TOKENS]
    side = int((given.get("max_image_size") or {}).get("longest_edge", inner.get("image_size", 364)))
    longest = int((given.get("size") or {}).get("longest_edge", 4 * side))
    count = (side // int(inner.get("patch_size", 14)) // int(config.get("scale_factor", 2))) ** 2
    tiles = range(1, math.ceil(longest / side) + 1)
    texts = [AROUND_TILE, WHOLE, LINE, *(place_of(row, column) for row in tiles for column in tiles)]
    if (vocabulary := tokens_around(config, texts)) is None:
        return None
    vocabulary |= {LINES: known[LINES]} if LINES in known else {}
    return ImageProcessor(
        settings={"rule": "split", "side": side, "longest": longest, "tokens": count}
        | {"splits": bool(given.get("do_image_splitting", True)), "resample": int(given.get("resample", 1))},
        placeholder="<image>",
        token=int(config.get("image_token_id") or known["<image>"]),
        num_tokens=count,
        vocabulary=vocabulary,
        layout=in_split,
        **scaling(given, HALF, HALF),
    )


def _smolvlm(config: Mapping[str, Any], given: Mapping[str, Any]) -> ImageProcessor | None:
    if (found := _idefics3(config, given)) is None:
        return None
    video = config[VIDEO]
    sampling = video.get("video_sampling") or given.get("video_sampling") or {}
    size = sampling.get("video_size") or video.get("size") or {}
    frame: dict[str, Any] = {"splits": False, "longest": int(size.get("longest_edge") or found.settings["side"])}
    frame |= {"sampling": "inside", "fps": float(sampling.get("fps") or 1), "skipped": 1.0}
    frame |= {"most_frames": int(sampling.get("max_frames") or 64)}
    form = VideoForm(
        settings=dict(found.settings) | frame,
        placeholder="<video>",
        before="You are provided the following series of {count} frames from a {duration} [H:MM:SS] video.\n",
        each="\nFrame from {clock}:{token}",
        after="\n\n",
        num_tokens=found.num_tokens,
        details=lambda is_last: (0, 0),
    )
    return dataclasses.replace(found, video=form)


PROCESSORS: dict[str, Maker] = {
    **TILED,
    "Exaone4_5_ForConditionalGeneration": _exaone,
    "Gemma3ForConditionalGeneration": _gemma3,
    "Gemma4ForConditionalGeneration": _gemma4,
    "Gemma4UnifiedForConditionalGeneration": _gemma4,
    "Glm46VForConditionalGeneration": _glm4v,
    "Glm4vForConditionalGeneration": _glm4v,
    "Glm4vMoeForConditionalGeneration": _glm4v,
    "GlmOcrForConditionalGeneration": _glm4v,
    "Idefics3ForConditionalGeneration": _idefics3,
    "InternVLChatModel": _internvl,
    "InternVLForConditionalGeneration": _internvl,
    "KimiK25ForConditionalGeneration": _kimi,
    "KimiVLForConditionalGeneration": _kimi,
    "Kimi_K25ForConditionalGeneration": _kimi,
    "LightOnOCRForConditionalGeneration": _lighton,
    "LightOnOcrForConditionalGeneration": _lighton,
    "LlavaForConditionalGeneration": _llava,
    "LlavaNextForConditionalGeneration": _llava_next,
    "LlavaNextVideoForConditionalGeneration": _llava_next,
    "LlavaOnevisionForConditionalGeneration": _llava_onevision,
    "Mistral3ForConditionalGeneration": _mistral3,
    "PaddleOCRVLForConditionalGeneration": _paddleocr,
    "PaliGemmaForConditionalGeneration": _paligemma,
    "QianfanOCRForConditionalGeneration": _internvl,
    "Qwen2VLForConditionalGeneration": _qwen25,
    "Qwen2_5OmniForConditionalGeneration": _qwen25_omni,
    "Qwen2_5OmniModel": _qwen25_omni,
    "Qwen2_5_VLForConditionalGeneration": _qwen25,
    "Qwen3OmniMoeForConditionalGeneration": _qwen3_omni,
    "CohereCompassForConditionalGeneration": _compass,
    "Qwen3VLForConditionalGeneration": _qwen3,
    "Qwen3VLMoeForConditionalGeneration": _qwen3,
    "Qwen3_5ForConditionalGeneration": _qwen3,
    "Qwen3_5MoeForConditionalGeneration": _qwen3,
    "SmolVLMForConditionalGeneration": _smolvlm,
}
"""By architecture of the checkpoint."""
