"""What the files of families share in reading how a checkpoint's images are scaled."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

IMAGENET_MEAN, IMAGENET_DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
CLIP_MEAN, CLIP_DEVIATION = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
HALF, ZEROS, ONES = (0.5,) * 3, (0.0,) * 3, (1.0,) * 3
TOKENS, VIDEO = "added_tokens", "video_processor"
"""Where a family finds the ids of added tokens, and what is said of videos, next to the configuration."""


def scaling(given: Mapping[str, Any], mean: tuple[float, ...], deviation: tuple[float, ...]) -> dict[str, Any]:
    """Mean and deviation of each colour, with a family's defaults, by which pixels are normalised."""
    if given.get("do_normalize") is False:
        return {"mean": ZEROS, "deviation": ONES}
    return {
        "mean": tuple(map(float, given.get("image_mean") or mean)),
        "deviation": tuple(map(float, given.get("image_std") or deviation)),
    }
