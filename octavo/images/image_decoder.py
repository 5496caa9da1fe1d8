"""The child process that decodes and resizes images: a file is a program for a decoder written in C, from a stranger.

Its memory and processor time are limited, and it may be killed at any time: see ``octavo.system.child_worker``. The
header is checked before anything is decoded: its format, and the number of its pixels. A question is the length of
its settings (4 bytes, big-endian), these in JSON, and the file; an answer is the same with the shape and the pixels.
"""

from __future__ import annotations

import io
import json
import warnings
from typing import Any

from PIL import Image, ImageOps

from octavo.errors import CANCELLATIONS
from octavo.images.resizing import ImageRefused
from octavo.images.tiling import tiled
from octavo.system.child_worker import FAILED, LENGTH, REFUSED, RENDERED, ChildWorker, described, start

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
SIXTEEN_BITS = ("I;16", "I;16L", "I;16B", "I;16N", "I")

Image.MAX_IMAGE_PIXELS = None  # the number is checked here
warnings.simplefilter("ignore")


def opened(data: bytes, most_pixels: int) -> Image.Image:
    """The image of which only the header is read. Raises ``ImageRefused``."""
    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
        width, height = image.size
    except MemoryError:
        raise
    except CANCELLATIONS:
        raise
    except BaseException as error:  # whatever a damaged header makes Pillow raise
        raise ImageRefused(
            f"is not a PNG, JPEG, WebP, GIF or BMP image that can be read ({type(error).__name__})"
        ) from None
    if width * height > most_pixels:
        raise ImageRefused(f"has {width} x {height} pixels; at most {most_pixels} are allowed")
    if width < 1 or height < 1:
        raise ImageRefused("has no pixels")
    return image


def as_rgb(image: Image.Image) -> Image.Image:
    """The first frame, upright, in RGB of 8 bits; what is transparent is white. Raises ``ImageRefused``."""
    try:
        image.load()
        turned = ImageOps.exif_transpose(image)
        if turned.mode in SIXTEEN_BITS:
            turned = turned.convert("I").point(lambda value: value * (1 / 257) + 0.5).convert("L")
        elif turned.mode == "F":
            turned = turned.point(lambda value: value * 255 + 0.5).convert("L")
        if "A" in turned.getbands() or "a" in turned.getbands() or turned.info.get("transparency") is not None:
            turned = turned.convert("RGBA")
            white = Image.new("RGBA", turned.size, (255, 255, 255, 255))
            turned = Image.alpha_composite(white, turned)
        return turned if turned.mode == "RGB" else turned.convert("RGB")
    except MemoryError:
        raise
    except CANCELLATIONS:
        raise
    except BaseException as error:  # whatever a damaged file makes Pillow raise
        raise ImageRefused(f"is damaged and cannot be decoded ({type(error).__name__})") from None


def prepared(data: bytes, settings: dict[str, Any]) -> tuple[tuple[int, int, int], tuple[int, ...], bytes]:
    """Tiles, rows and columns of the resized image, details for the tower, and the pixels, uint8 RGB.

    ``settings`` are those of ``ImageProcessor``. Raises ``ImageRefused``.
    """
    tiles, details = tiled(as_rgb(opened(data, settings["most_pixels"])), settings)
    pixels = b"".join(tile.tobytes() for tile in tiles)
    return (len(tiles), tiles[0].height, tiles[0].width), details, pixels


def serve(question: bytes) -> tuple[bytes, bytes]:
    """The prepared image, or why there is none."""
    (size,) = LENGTH.unpack_from(question)
    settings = json.loads(question[LENGTH.size : LENGTH.size + size])
    try:
        shape, details, pixels = prepared(question[LENGTH.size + size :], settings)
    except ImageRefused as refused:
        return REFUSED, str(refused).encode()
    except MemoryError:
        raise
    except CANCELLATIONS:
        raise
    except BaseException as error:  # whatever the library raises
        return FAILED, described(error).encode()
    head = json.dumps([shape, details]).encode()
    return RENDERED, LENGTH.pack(len(head)) + head + pixels


def main() -> None:
    started = start()
    if started is not None:
        connection, settings = started
        ChildWorker(connection, settings).run_bytes(serve)


if __name__ == "__main__":
    main()
