"""Images in tiles of one size, which the tower takes one by one and the decoder as one image."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from PIL import Image, ImageOps

from octavo.images.resizing import (
    RULES,
    best_canvas,
    best_grid,
    best_pinpoint,
    is_in_tiles,
    packed,
    sliced,
    sliced_grid,
    split_sizes,
    within,
    within_patches,
)

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
    choose = best_canvas if settings["rule"] == "canvas" else best_grid
    rows, columns = choose(image.height, image.width, settings)
    tiles = _cut(_resized(image, (rows * height, columns * width), settings), height, width)
    return [*tiles, *([_resized(image, (height, width), settings)] if len(tiles) > 1 else [])], ()


def fitted(image: Image.Image, settings: dict[str, Any]) -> Tiles:
    """Tiles of the image, with black to the right and below where its ratio is another, and behind several of them the
    entire image. No side is enlarged beyond that of a tile, unless the largest are asked for (Llama 4)."""
    side = settings["side"]
    rows, columns = best_canvas(image.height, image.width, settings)
    most = rows * side, columns * side
    if not settings.get("largest"):
        most = min(max(image.height, side), most[0]), min(max(image.width, side), most[1])
    filled = Image.new("RGB", (columns * side, rows * side))
    filled.paste(_resized(image, within(image.height, image.width, most, math.floor), settings))
    tiles = _cut(filled, side, side)
    whole = [_resized(image, (side, side), settings)] if len(tiles) > 1 else []
    return [*tiles, *whole], (rows, columns)


def in_parts(image: Image.Image, settings: dict[str, Any]) -> Tiles:
    """Tiles of an image that is large, its ratio nearly kept; and the entire image by the settings ``whole``. The
    numbers are those of ``tower_parts.unpacked`` (LFM2-VL)."""
    side, (rows, columns) = settings["height"], (0, 0)
    tiles: list[Image.Image] = []
    if is_in_tiles(image.height, image.width, settings):
        rows, columns = best_grid(image.height, image.width, settings)
        tiles = _cut(_resized(image, (rows * side, columns * side), settings), side, side)
    height, width = RULES[settings["whole"]["rule"]](image.height, image.width, settings["whole"])
    return [*tiles, _resized(image, (height, width), settings)], (rows, columns, side, side, height, width)


def in_slices(image: Image.Image, settings: dict[str, Any]) -> Tiles:
    """Tiles of an image that is large, its ratio nearly kept, and the entire image, both of about the same area. The
    numbers are those of ``tower_parts.unpacked`` (MiniCPM-V)."""
    rows, columns = sliced_grid(image.height, image.width, settings)
    is_sliced = rows * columns > 0
    height, width = sliced(image.height, image.width, settings, grows=not is_sliced)
    tile_height, tile_width = (0, 0)
    tiles: list[Image.Image] = []
    if is_sliced:
        sides = max(1, round(image.height / rows)), max(1, round(image.width / columns))
        tile_height, tile_width = sliced(*sides, settings, grows=True)
        tiles = _cut(_resized(image, (rows * tile_height, columns * tile_width), settings), tile_height, tile_width)
    whole = _resized(image, (height, width), settings)
    return [*tiles, whole], (rows, columns, tile_height, tile_width, height, width)


def in_pinpoint(image: Image.Image, settings: dict[str, Any]) -> Tiles:
    """The entire image, and tiles of it, in black where it has another ratio. The numbers: rows and columns of tiles,
    and what ``packed`` gives."""
    side, point = settings["side"], best_pinpoint(image.height, image.width, settings)
    rows, columns = within(image.height, image.width, point)
    filled = Image.new("RGB", (point[1], point[0]))
    filled.paste(_resized(image, (rows, columns), settings), ((point[1] - columns) // 2, (point[0] - rows) // 2))
    numbers = point[0] // side, point[1] // side, *packed(image.height, image.width, point, settings)
    return [_resized(image, (side, side), settings), *_cut(filled, side, side)], numbers


def in_padded_pinpoint(image: Image.Image, settings: dict[str, Any]) -> Tiles:
    """The entire image, and tiles of it, each in the middle of grey where the ratio is another. The numbers: rows and
    columns of tiles (DeepSeek-VL2)."""
    side, point = settings["side"], best_pinpoint(image.height, image.width, settings)
    grey, method = tuple(settings["grey"]), RESAMPLING[settings["resample"]]
    whole, large = (ImageOps.pad(image, size, method, grey) for size in ((side, side), (point[1], point[0])))
    return [whole, *_cut(large, side, side)], (point[0] // side, point[1] // side)


def in_views(image: Image.Image, settings: dict[str, Any]) -> Tiles:
    """Tiles of an image that is larger than one, its ratio nearly kept; and the entire image in the middle of grey. The
    numbers are those of ``tower_parts.unpacked`` (DeepSeek-OCR)."""
    tile, side, (rows, columns) = settings["height"], settings["side"], (0, 0)
    tiles: list[Image.Image] = []
    if max(image.size) > tile and settings["most"] >= settings["least"]:
        rows, columns = best_grid(image.height, image.width, settings)
        tiles = _cut(_resized(image, (rows * tile, columns * tile), settings), tile, tile)
    whole = ImageOps.pad(image, (side, side), RESAMPLING[settings["resample"]], tuple(settings["grey"]))
    return [*tiles, whole], (rows, columns, tile, tile, side, side)


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
    "canvas": in_grid,
    "fitted": fitted,
    "grid": in_grid,
    "middle": in_middle,
    "padded": padded,
    "padded pinpoints": in_padded_pinpoint,
    "parts": in_parts,
    "pinpoints": in_pinpoint,
    "slices": in_slices,
    "split": split,
    "views": in_views,
}


def joined(tiles: list[Image.Image]) -> tuple[tuple[int, int, int], bytes]:
    """The pixels of all tiles, uint8 RGB, and their shape: [tiles, rows, columns], or of tiles that differ in size
    [1, 1, all pixels]."""
    pixels, (columns, rows) = b"".join(tile.tobytes() for tile in tiles), tiles[0].size
    is_even = all(tile.size == tiles[0].size for tile in tiles)
    return (len(tiles), rows, columns) if is_even else (1, 1, len(pixels) // 3), pixels


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
