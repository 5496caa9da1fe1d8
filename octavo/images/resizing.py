"""To which size a model's images are brought: arithmetic on sides, in pixels.

Each rule is that of the family's own processor, as published with its checkpoints.
"""

from __future__ import annotations

import math
from typing import Any

MOST_RATIO = 200
"""Of the sides of an image."""


class ImageRefused(ValueError):
    """An image that cannot be prepared. The message is for the client."""


def by_area(height: int, width: int, settings: dict[str, Any]) -> tuple[int, int]:
    """Both sides multiples of ``factor``, the area between ``least`` and ``most``, the ratio nearly kept
    (Qwen2-VL). With ``grows``, no side is less than ``factor`` before that (GLM-4V)."""
    factor, least, most = settings["factor"], settings["least"], settings["most"]
    if settings.get("grows") and min(height, width) < factor:
        scale = max(factor / height, factor / width)
        height, width = int(height * scale), int(width * scale)
    if max(height, width) > MOST_RATIO * min(height, width):
        raise ImageRefused(f"is {width} x {height} pixels: one side is more than {MOST_RATIO} times the other")
    rows, columns = round(height / factor) * factor, round(width / factor) * factor
    if rows * columns > most:
        shrink = math.sqrt(height * width / most)
        rows = max(factor, math.floor(height / shrink / factor) * factor)
        columns = max(factor, math.floor(width / shrink / factor) * factor)
    elif rows * columns < least:
        grow = math.sqrt(least / (height * width))
        rows, columns = math.ceil(height * grow / factor) * factor, math.ceil(width * grow / factor) * factor
    return rows, columns


def fixed(height: int, width: int, settings: dict[str, Any]) -> tuple[int, int]:
    """The size that all images get."""
    return settings["height"], settings["width"]


def by_longest(height: int, width: int, settings: dict[str, Any]) -> tuple[int, int]:
    """No side longer than ``longest``, then up to the next multiples of ``factor`` (Pixtral)."""
    longest, factor = settings["longest"], settings["factor"]
    ratio = max(height, width) / longest
    if ratio > 1:
        height, width = math.floor(height / ratio), math.floor(width / ratio)
    return max(1, -(-height // factor)) * factor, max(1, -(-width // factor)) * factor


def by_squares(height: int, width: int, settings: dict[str, Any]) -> tuple[int, int]:
    """As large as can be with at most ``most`` squares of side ``factor``, the ratio nearly kept (Gemma 4)."""
    most, factor = settings["most"], settings["factor"]
    scale = math.sqrt(most * factor**2 / (height * width))
    rows, columns = math.floor(height * scale / factor), math.floor(width * scale / factor)
    if not rows:
        rows, columns = 1, min(width // height, most)
    elif not columns:
        rows, columns = min(height // width, most), 1
    return rows * factor, columns * factor


RULES = {"area": by_area, "fixed": fixed, "longest": by_longest, "squares": by_squares}
