"""What the files of families share in reading how a checkpoint's images are scaled."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

IMAGENET_MEAN, IMAGENET_DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
CLIP_MEAN, CLIP_DEVIATION = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
HALF, ZEROS, ONES = (0.5,) * 3, (0.0,) * 3, (1.0,) * 3
TOKENS, VIDEO = "added_tokens", "video_processor"
"""Where a family finds the ids of added tokens, and what is said of videos, next to the configuration."""


def scaling(given: Mapping[str, Any], mean: tuple[float, ...], deviation: tuple[float, ...]) -> dict[str, Any]:
    """Mean and deviation of each colour, with a family's defaults, by which pixels are normalised.

    Raises ``ValueError``.
    """
    if given.get("do_normalize") is False:
        return {"mean": ZEROS, "deviation": ONES}
    return {
        "mean": _of_colours(given, "image_mean", mean, -math.inf),
        "deviation": _of_colours(given, "image_std", deviation, 0.0),
    }


def _of_colours(given: Mapping[str, Any], key: str, default: tuple[float, ...], low: float) -> tuple[float, ...]:
    values = given.get(key) or default
    try:
        found = tuple(map(float, values))
    except (OverflowError, TypeError, ValueError):
        found = ()
    if len(found) != len(default) or not all(low < value < math.inf for value in found):
        raise ValueError(f"{key} is {repr(values)[:200]}; it must have {len(default)} numbers{' above 0' * (low == 0)}")
    return found
