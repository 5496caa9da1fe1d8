"""To which size a model's images are brought, and in how many tiles: arithmetic on sides, in pixels.

Each rule is that of the family's own processor, as published with its checkpoints.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from octavo.errors import failures_as

MOST_RATIO = 200
"""Of the sides of an image."""


class ImageRefused(ValueError):
    """An image that cannot be prepared. The message is for the client."""


def refusing(message: str) -> AbstractContextManager[None]:
    """Raise ``ImageRefused`` with ``message`` for whatever a damaged file makes a library raise in this block."""
    return failures_as(lambda error: ImageRefused(f"{message} ({type(error).__name__})"), MemoryError, ImageRefused)


def refuse_long(height: int, width: int) -> None:
    """Raises ``ImageRefused`` if one side is much longer than the other."""
    if max(height, width) > MOST_RATIO * min(height, width):
        raise ImageRefused(f"is {width} x {height} pixels: one side is more than {MOST_RATIO} times the other")


def by_area(height: int, width: int, settings: dict[str, Any]) -> tuple[int, int]:
    """Both sides multiples of ``factor``, the area between ``least`` and ``most``, the ratio nearly kept
    (Qwen2-VL). With ``grows``, no side is less than ``factor`` before that (GLM-4V). With ``num_frames``, the area is
    that of all frames of a video, whose embeddings span ``group`` of them; GLM-4V's images are two frames. With
    ``rounds`` it grows one side after the other (PaddleOCR-VL); with ``shortest``, sides are rounded to that at least
    (LFM2-VL)."""
    factor, least, most = settings["factor"], settings["least"], settings["most"]
    count, group, shortest = settings.get("num_frames", 1), settings.get("group", 1), settings.get("shortest", 0)
    if settings.get("rounds"):
        if height < factor:
            height, width = factor, round(width * factor / height)
        if width < factor:
            height, width = round(height * factor / width), factor
    if settings.get("grows") and min(height, width) < factor:
        scale = max(factor / height, factor / width)
        height, width = int(height * scale), int(width * scale)
    refuse_long(height, width)
    rows, columns = (max(shortest, round(side / factor) * factor) for side in (height, width))
    volume = rows * columns * round(count / group) * group
    if volume > most:
        shrink = math.sqrt(count * height * width / most)
        rows = max(factor, math.floor(height / shrink / factor) * factor)
        columns = max(factor, math.floor(width / shrink / factor) * factor)
    elif volume < least:
        grow = math.sqrt(least / (count * height * width))
        rows, columns = math.ceil(height * grow / factor) * factor, math.ceil(width * grow / factor) * factor
    return rows, columns


def fixed(height: int, width: int, settings: dict[str, Any]) -> tuple[int, int]:
    """The size that all images get."""
    return settings["height"], settings["width"]


def by_longest(height: int, width: int, settings: dict[str, Any]) -> tuple[int, int]:
    """No side longer than ``longest``, then up to the next multiples of ``factor``, of which one side of an embedding
    may have several (Pixtral)."""
    longest, factor = settings["longest"], settings["factor"]
    shortest = settings.get("side", factor)
    ratio = max(height, width) / longest
    if ratio > 1:
        height, width = math.floor(height / ratio), math.floor(width / ratio)
    return max(shortest, -(-height // factor) * factor), max(shortest, -(-width // factor) * factor)


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

LOW_SIDE = 512
LOW_PIXELS = 512 * 512
"""Most pixels of an image with ``detail`` low, where the model takes images of any size."""
LOW_SQUARES = 70
"""The smallest number of embeddings for which Gemma 4 was trained."""


def low(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings for images of low detail, as far as the size can be chosen."""
    match settings["rule"]:
        case "area":
            most = LOW_PIXELS * settings.get("group", 1)
            return {**settings, "most": max(settings["least"], min(settings["most"], most))}
        case "longest":
            return {**settings, "longest": min(settings["longest"], LOW_SIDE)}
        case "squares":
            return {**settings, "most": min(settings["most"], LOW_SQUARES)}
        case "padded":
            return {**settings, "most": min(settings["most"], LOW_PIXELS // settings["patch"] ** 2)}
        case "grid" | "canvas" | "fitted" | "parts" | "slices":
            return {**settings, "least": 1, "most": 1}
        case "split":
            return {**settings, "longest": settings["side"]}
        case "views":
            return {**settings, "most": 0}
        case "pinpoints" | "padded pinpoints":
            return {**settings, "pinpoints": [min(settings["pinpoints"], key=math.prod)]}
    return settings


def limited(settings: dict[str, Any], most_tokens: int) -> dict[str, Any]:
    """The settings with which an image has no more than so many tokens, as far as the size can be chosen."""
    match settings["rule"]:
        case "area":
            most = most_tokens * settings["factor"] ** 2 * settings.get("group", 1)
            return {**settings, "most": min(settings["most"], most)}
        case "longest":
            side = settings.get("side", settings["factor"])
            return {**settings, "longest": min(settings["longest"], math.isqrt(most_tokens) * side)}
        case "squares":
            return {**settings, "most": min(settings["most"], most_tokens)}
        case "padded":
            return {**settings, "most_tokens": most_tokens}
        case "grid" | "canvas" | "fitted":
            most = max(1, min(settings["most"], most_tokens // settings["tokens"] - 1))  # and the whole image
            return {**settings, "least": min(settings["least"], most), "most": most}
        case "parts":
            whole: dict[str, Any] = settings["whole"]
            area = min(whole["most"], most_tokens * whole["factor"] ** 2)
            tiles = (most_tokens - area // whole["factor"] ** 2) // (settings["tokens"] + 1)
            most = max(1, min(settings["most"], tiles))
            known = {"whole": {**whole, "least": min(whole["least"], area), "most": area}}
            return {**settings, **known, "least": 1 if most < settings["least"] else settings["least"], "most": most}
        case "slices":
            most = most_tokens // settings["tokens"] - 1  # and the whole image
            return {**settings, "most": max(1, min(settings["most"], most))}
        case "views":
            return {**settings, "most": min(settings["most"], (most_tokens - settings["whole"]) // settings["tokens"])}
        case "split":
            tiles = most_tokens // (settings["tokens"] + 4) - 1  # four tokens are around those of a tile
            longest = max(1, math.isqrt(max(1, tiles))) * settings["side"]
            return {**settings, "longest": min(settings["longest"], longest)}
        case "pinpoints" | "padded pinpoints":
            points = [point for point in settings["pinpoints"] if most_packed(point, settings) <= most_tokens]
            return {**settings, "pinpoints": points or [min(settings["pinpoints"], key=math.prod)]}
    return settings


def best_grid(height: int, width: int, settings: dict[str, Any]) -> tuple[int, int]:
    """Rows and columns of ``least`` to ``most`` tiles whose ratio is nearest to the image's (InternVL 1.5, arXiv
    2404.16821). Of equal ratios the larger one, unless it has more than twice the image's pixels."""
    least, most, ratio = settings["least"], settings["most"], width / height
    found, smallest = (1, 1), math.inf
    grids = [(rows, columns) for columns in range(1, most + 1) for rows in range(1, most // columns + 1)]
    for rows, columns in sorted((grid for grid in grids if math.prod(grid) >= least), key=math.prod):
        difference = abs(ratio - columns / rows)
        is_large = width * height > 0.5 * settings["height"] * settings["width"] * rows * columns
        if difference < smallest or (difference == smallest and is_large):
            found, smallest = (rows, columns), difference
    return found


def best_canvas(height: int, width: int, settings: dict[str, Any]) -> tuple[int, int]:
    """Rows and columns of at most ``most`` tiles of side ``side`` into which an image fits with its ratio kept: those
    that enlarge it least; of those that do not, the ones that shrink it least; and of these the fewest tiles. With
    ``largest``, those that enlarge it most (Llama 4, Command A Vision)."""
    side, most = settings["side"], settings["most"]
    grids = [(rows, columns) for columns in range(1, most + 1) for rows in range(1, most // columns + 1)]
    scales = {grid: min(grid[0] * side / height, grid[1] * side / width) for grid in grids}
    larger = [scale for scale in scales.values() if scale >= 1]
    choose = max if settings.get("largest") or not larger else min
    best = choose(larger or scales.values())
    return min((grid for grid, scale in scales.items() if scale == best), key=math.prod)


def is_in_tiles(height: int, width: int, settings: dict[str, Any]) -> bool:
    """Whether an image is cut into tiles: if it has more than ``tolerance`` times the most pixels of the settings
    ``whole`` (LFM2-VL)."""
    whole: dict[str, Any] = settings["whole"]
    factor, shortest = whole["factor"], whole["factor"] // settings["merge"]
    rows, columns = (max(shortest, round(side / factor) * factor) for side in (height, width))
    return bool(settings["most"] > 1 and rows * columns > whole["most"] * settings["tolerance"])


def sliced_grid(height: int, width: int, settings: dict[str, Any]) -> tuple[int, int]:
    """Rows and columns of the slices of an image, 0 if there are none: at most ``most``, about as many as it has
    squares of side ``side``, so that they are most nearly square (LLaVA-UHD, arXiv 2403.11703; MiniCPM-V)."""
    refuse_long(height, width)
    most, ratio = settings["most"], width / height
    count = min(math.ceil(height * width / settings["side"] ** 2), most)
    if count <= 1:
        return 0, 0
    counts = [each for each in (count - 1, count, count + 1) if 1 < each <= most]
    grids = [(rows, each // rows) for each in counts for rows in range(1, each + 1) if each % rows == 0]
    found, smallest = (1, 1), math.inf
    for rows, columns in grids:
        error = abs(math.log(ratio) - math.log(columns / rows))
        if error < smallest or (error == smallest and rows > found[0]):
            found, smallest = (rows, columns), error
    return found


def sliced(height: float, width: float, settings: dict[str, Any], grows: bool) -> tuple[int, int]:
    """The size of a slice or of the entire image: both sides multiples of ``factor``, the area about that of a square
    of side ``side``, or that of a smaller image unless it ``grows`` (MiniCPM-V)."""
    side, factor = settings["side"], settings["factor"]
    if grows or height * width > side**2:
        ratio = width / height
        height = int(side / math.sqrt(ratio))
        width = int(height * ratio)
    rows, columns = (max(factor, round(length / factor) * factor) for length in (height, width))
    return rows, columns


def most_in_slice(cells: int) -> int:
    """Squares of side ``factor`` in the largest that ``sliced`` gives, with ``cells`` of them in a row of a square: one
    that has so many rows is at most so long that these are rounded up to it."""
    longest = MOST_RATIO**0.5
    ends = (min(longest, cells / (rows - 0.5)) if rows > 1 else longest for rows in range(1, cells + 1))
    return max(int(rows * (cells * end + 0.5)) for rows, end in enumerate(ends, 1))


def best_pinpoint(height: int, width: int, settings: dict[str, Any]) -> tuple[int, int]:
    """The size, of those that a model has, that keeps most of an image's pixels and wastes fewest (LLaVA-NeXT)."""

    def kept_and_wasted(point: list[int]) -> tuple[int, int]:
        scale = min(point[1] / width, point[0] / height)
        kept = min(int(width * scale) * int(height * scale), width * height)
        return kept, kept - math.prod(point)

    rows, columns = max(settings["pinpoints"], key=kept_and_wasted)
    return rows, columns


def within(
    height: int, width: int, point: tuple[int, int], rounded: Callable[[float], int] = math.ceil
) -> tuple[int, int]:
    """The largest size of an image of this ratio in a size."""
    rows, columns = point
    if columns / width < rows / height:
        return min(max(1, rounded(height * (columns / width))), rows), columns
    return rows, min(max(1, rounded(width * (rows / height))), columns)


def within_patches(height: int, width: int, settings: dict[str, Any]) -> tuple[int, int]:
    """The sides of an image that has at most ``most`` patches, ``longest`` of them in a row or column, and at most
    ``most_tokens`` squares of side ``factor`` (Kimi-VL)."""
    patch, factor, side = settings["patch"], settings["factor"], settings["longest"] * settings["patch"]
    count = max(1, height // patch) * max(1, width // patch)
    scale = min(1.0, math.sqrt(settings["most"] / count), side / height, side / width)
    while True:
        rows, columns = (min(side, max(1, int(length * scale))) for length in (height, width))
        squares = -(-rows // factor) * -(-columns // factor)
        if squares <= settings.get("most_tokens", squares) or squares == 1:
            return rows, columns
        scale *= 0.98


def packed(height: int, width: int, point: tuple[int, int], settings: dict[str, Any]) -> tuple[int, int, int, int]:
    """Of an image in tiles that fill ``point``: the rows and columns of embeddings that are not all padding, and those
    to which they are reduced (LLaVA-NeXT, LLaVA-OneVision)."""
    side, cells = settings["side"], settings["cells"]
    rows, columns = point[0] // side * cells, point[1] // side * cells
    if width / height > columns / rows:
        rows -= (rows - int(round(height * (columns / width), 7))) // 2 * 2
    else:
        columns -= (columns - int(round(width * (rows / height), 7))) // 2 * 2
    ratio = math.sqrt(rows * columns / (settings["most"] * cells**2)) if settings["most"] else 0
    return rows, columns, *((int(rows // ratio), int(columns // ratio)) if ratio > 1.1 else (rows, columns))


def most_packed(point: list[int], settings: dict[str, Any]) -> int:
    """Embeddings of an image that fills a size, those of the whole image and of line ends included."""
    _, _, rows, columns = packed(point[0], point[1], (point[0], point[1]), settings)
    return int(settings["cells"]) ** 2 + rows * (columns + 1) + int(settings.get("between", 0))


def split_sizes(height: int, width: int, settings: dict[str, Any]) -> list[tuple[int, int]]:
    """The two sizes to which an image is brought in turn (Idefics 3, arXiv 2408.12637): the longer side is ``longest``
    pixels and the other one even, then both are multiples of ``side``, or ``side`` if the image is not split."""
    side, longest = settings["side"], settings["longest"]
    is_wide, ratio = width >= height, width / height
    shorter = int(longest / ratio if is_wide else longest * ratio)
    shorter = max(1, shorter + shorter % 2)
    first = (shorter, longest) if is_wide else (longest, shorter)
    if not settings["splits"]:
        return [first, (side, side)]
    ratio, long = first[1] / first[0], math.ceil(longest / side) * side
    short = math.ceil(max(1, int(long / ratio if is_wide else long * ratio)) / side) * side
    return [first, (short, long) if is_wide else (long, short)]
