"""Images in tiles of one size, which the tower takes one by one and the decoder as one image."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from PIL import Image

from octavo.images.resizing import RULES, best_grid, best_pinpoint, packed, split_sizes, within, within_patches

RESAMPLING = {0: Image.Resampling.NEAREST, 1: Image.Resampling.LANCZOS, 2: Image.Resampling.BILINEAR}
RESAMPLING |= {3: Image.Resampling.BICUBIC, 4: Image.Resampling.BOX, 5: Image.Resampling.HAMMING}

Tiles = tuple[list[Image.Image], tuple[int, ...]]
"""Tiles, and what the tower and the prompt have to know of them."""


def _resized(image: Image.Image, size: tuple[int, int], settings: dict[str, Any]) -> Image.Image:
    """``size``: rows and columns."""
    return image.resize((size[1], size[0]), RESAMPLING[settings["resample"]])


def _cut(image: Image.Image, height: int, width: int) -> list[Image.Image]:
    """The tiles of an image, row by row."""
    tops, lefts = range(0, image.height, height), range(0, image.width, width)
    return [image.crop((left, top, left + width, top + height)) for top in tops for left in lefts]


def in_grid(image: Image.Image, settings: dict[str, Any]) -> Tiles:
    """Tiles of the image, its ratio nearly kept, and behind several of them the entire image."""
    height, width = settings["height"], settings["width"]
    rows, columns = best_grid(image.height, image.width, settings)
    tiles = _cut(_resized(image, (rows * height, columns * width), settings), height, width)
    return [*tiles, *([_resized(image, (height, width), settings)] if len(tiles) > 1 else [])], ()


def in_pinpoint(image: Image.Image, settings: dict[str, Any]) -> Tiles:
    """The entire image, and tiles of it, in black where it has another ratio. The numbers: rows and columns of tiles,
    and what ``packed`` gives."""
    side, point = settings["side"], best_pinpoint(image.height, image.width, settings)
    rows, columns = within(image.height, image.width, point)
    filled = Image.new("RGB", (point[1], point[0]))
    filled.paste(_resized(image, (rows, columns), settings), ((point[1] - columns) // 2, (point[0] - rows) // 2))
    numbers = point[0] // side, point[1] // side, *packed(image.height, image.width, point, settings)
    return [_resized(image, (side, side), settings), *_cut(filled, side, side)], numbers


def split(image: Image.Image, settings: dict[str, Any]) -> Tiles:
    """Tiles of the image and then the entire one; only that if it fits into a tile. The numbers: rows and columns of
    tiles, 0 if there are none but the entire image."""
    side = settings["side"]
    for size in split_sizes(image.height, image.width, settings):
        image = _resized(image, size, settings)
    if image.size == (side, side):
        return [image], (0, 0)
    whole = _resized(image, (side, side), settings)
    return [*_cut(image, side, side), whole], (image.height // side, image.width // side)


def in_middle(image: Image.Image, settings: dict[str, Any]) -> Tiles:
    """The middle of the image, whose shorter side is brought to that of a tile (CLIP)."""
    side, short, long = settings["side"], *sorted(image.size)
    longer = int(side * long / short)
    size = (side, longer) if image.width > image.height else (longer, side)
    resized = _resized(image, size, settings)
    left, top = (resized.width - side) // 2, (resized.height - side) // 2
    return [resized.crop((left, top, left + side, top + side))], ()


def padded(image: Image.Image, settings: dict[str, Any]) -> Tiles:
    """The image, smaller if need be, with black behind it up to the next multiples of ``factor``."""
    resized = _resized(image, within_patches(image.height, image.width, settings), settings)
    rows, columns = (-(-side // settings["factor"]) * settings["factor"] for side in (resized.height, resized.width))
    filled = Image.new("RGB", (columns, rows))
    filled.paste(resized)
    return [filled], ()


TILINGS: dict[str, Callable[[Image.Image, dict[str, Any]], Tiles]] = {
    "grid": in_grid,
    "middle": in_middle,
    "padded": padded,
    "pinpoints": in_pinpoint,
    "split": split,
}


def size_of(height: int, width: int, settings: dict[str, Any]) -> tuple[int, int]:
    """Rows and columns of pixels that an image of such a size has after resizing, of a family whose images differ in
    size and are not cut into tiles."""
    rule = settings["rule"]
    return within_patches(height, width, settings) if rule == "padded" else RULES[rule](height, width, settings)


def tiled(image: Image.Image, settings: dict[str, Any]) -> Tiles:
    """The resized image, whole or in tiles. ``settings`` are those of ``ImageProcessor``. Raises ``ImageRefused``."""
    rule = settings["rule"]
    if rule in TILINGS:
        return TILINGS[rule](image, settings)
    return [_resized(image, RULES[rule](image.height, image.width, settings), settings)], ()
