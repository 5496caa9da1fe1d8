"""The child process that decodes and resizes images: a file is a program for a decoder written in C, from a stranger.

Its memory and processor time are limited, and it may be killed at any time: see ``octavo.system.child_worker``. The
header is checked before anything is decoded: its format, and the number of its pixels. A question is the length of
its settings (4 bytes, big-endian), these in JSON, and the file; an answer is the same with the shape and the pixels.

The question about a video has ``sizes`` among its settings, those of its files: a video, or its frames as images.
Animations are read by Pillow and other videos by PyAV, if that is installed. FFmpeg is told the format and never
guesses it: some, such as playlists, would open other files. That about a sound has ``audio``, with the ``rate`` and
``most_seconds`` of ``samples_of``; the answer's shape is [1, 1, samples].
"""

from __future__ import annotations

import io
import json
import warnings
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any

from PIL import Image, ImageOps

from octavo.images.audio import SAMPLE_BYTES
from octavo.images.resizing import ImageRefused, refusing
from octavo.images.tiling import joined, tiled
from octavo.images.videos import Frames, for_frames, sampled
from octavo.system.child_worker import LENGTH, REFUSED, RENDERED, ChildWorker, start

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
IMAGE, ANIMATION = "a PNG, JPEG, WebP, GIF or BMP image", "an MP4, WebM, GIF, WebP or PNG"
SIXTEEN_BITS = ("I;16", "I;16L", "I;16B", "I;16N", "I")
MOST_PIXELS = 40_000_000
"""Of a file, which is decoded as a whole."""
DEFAULT_RATE = 2.0
"""Frames a second of a video that is given as images."""
NEEDS_PYAV = (
    "needs PyAV on this server: pip install 'octavo[video]'; animated GIF, WebP and PNG, and frames as images, need "
    "nothing"
)
Choose = Callable[[int, float], list[int]]
"""Maps the number of a video's frames and their rate to the places of those that are wanted, in order; once more, with
the right number, where a file has fewer frames than it seems to have."""

Image.MAX_IMAGE_PIXELS = None  # the number is checked here
warnings.simplefilter("ignore")


def opened(data: bytes, kind: str = IMAGE) -> Image.Image:
    """The image of which only the header is read. Raises ``ImageRefused``."""
    with refusing(f"is not {kind} that can be read"):
        image = Image.open(io.BytesIO(data), formats=FORMATS)
        width, height = image.size
    if width * height > MOST_PIXELS:
        raise ImageRefused(f"has {width} x {height} pixels; at most {MOST_PIXELS} are allowed")
    if width < 1 or height < 1:
        raise ImageRefused("has no pixels")
    return image


def as_rgb(image: Image.Image) -> Image.Image:
    """The first frame, upright, in RGB of 8 bits; what is transparent is white. Raises ``ImageRefused``."""
    with refusing("is damaged and cannot be decoded"):
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


def prepared(data: bytes, settings: dict[str, Any]) -> tuple[tuple[int, int, int], tuple[int, ...], bytes]:
    """Tiles, rows and columns of the resized image, details for the tower, and the pixels, uint8 RGB.

    ``settings`` are those of ``ImageProcessor``. Raises ``ImageRefused``.
    """
    tiles, details = tiled(as_rgb(opened(data)), settings)
    shape, pixels = joined(tiles)
    return shape, details, pixels


def prepared_frames(files: Sequence[bytes], settings: dict[str, Any]) -> Frames:
    """The frames of a video that a model sees, resized. ``files``: a video, or its frames as images.

    ``settings`` are those of ``VideoForm``, with its ``group``. Raises ``ImageRefused``.
    """
    if len(files) > 1:
        settings = {**settings, "sampling": "all"}
    header: tuple[int, float, list[int]] = 0, 0.0, []
    resized, size, resizing = list[Image.Image](), (0, 0), settings

    def choose(total: int, rate: float) -> list[int]:
        nonlocal header
        header = total, rate, sampled(total, rate, settings)
        resized.clear()
        return list(header[2])

    for frame in _frames(files, settings, choose):
        if not resized:
            resizing, size = for_frames(settings, len(header[2]), settings["group"]), frame.size
        if frame.size != size:
            raise ImageRefused(f"has frames of {size[0]} x {size[1]} and of {frame.width} x {frame.height} pixels")
        resized += tiled(frame, resizing)[0]
    total, rate, places = header
    if not resized or len(resized) < len(places):
        raise ImageRefused(f"is damaged: {len(resized)} of {len(places)} frames can be decoded")
    shape = len(resized), resized[0].height, resized[0].width
    return Frames(shape, places, total, rate, b"".join(frame.tobytes() for frame in resized))


def _frames(files: Sequence[bytes], settings: dict[str, Any], choose: Choose) -> Iterator[Image.Image]:
    """The chosen frames, upright, in RGB."""
    first = files[0]
    if len(files) > 1:
        for place in choose(len(files), settings.get("rate") or DEFAULT_RATE):
            yield as_rgb(opened(files[place]))
    elif first[:4] == b"\x1aE\xdf\xa3":
        yield from _of_container(first, "matroska", choose)
    elif first[4:8] == b"ftyp":
        yield from _of_container(first, "mp4", choose)
    else:
        yield from _of_animation(first, choose)


def _of_animation(data: bytes, choose: Choose) -> Iterator[Image.Image]:
    image = opened(data, ANIMATION)
    total, seconds = getattr(image, "n_frames", 1), 0.0
    for place in range(total):
        _seek(image, place)
        seconds += (image.info.get("duration") or 100) / 1000
    image = opened(data)  # as not every format can go back
    for place in choose(total, total / seconds):
        _seek(image, place)
        yield as_rgb(image)


def _seek(image: Image.Image, place: int) -> None:
    with refusing(f"is damaged: frame {place} cannot be decoded"):
        image.seek(place)
        image.load()


def _of_container(data: bytes, format: str, choose: Choose) -> Iterator[Image.Image]:
    try:
        import av  # only here: most servers get no videos
    except ImportError:
        raise ImageRefused(NEEDS_PYAV) from None
    with refusing("is damaged and cannot be decoded"), av.open(io.BytesIO(data), format=format) as container:
        yield from _decoded(container, choose)


def _decoded(container: Any, choose: Choose) -> Iterator[Image.Image]:
    stream = container.streams.video[0]
    context = stream.codec_context
    context.thread_count = 1
    if context.width * context.height > MOST_PIXELS:
        raise ImageRefused(f"has {context.width} x {context.height} pixels; at most {MOST_PIXELS} are allowed")
    total = sum(1 for packet in container.demux(stream) if packet.size and not packet.is_discard)
    if not total:
        raise ImageRefused("has no frames")
    while total:
        container.seek(0, stream=stream)
        wanted, count = choose(total, float(stream.average_rate or 24)), 0
        for count, frame in enumerate(container.decode(stream), 1):
            while wanted and wanted[0] == count - 1:
                wanted.pop(0)
                if frame.width * frame.height > MOST_PIXELS:
                    found = f"{frame.width} x {frame.height}"
                    raise ImageRefused(f"has frames of {found} pixels; {MOST_PIXELS} are allowed")
                image = frame.to_image()
                yield image.rotate(frame.rotation, expand=True) if frame.rotation else image
            if not wanted:
                return
        total = count  # the other packets show nothing, as VP8's references, or need frames that were cut off


def sound(data: bytes, settings: dict[str, Any]) -> tuple[list[tuple[int, int, int]], bytes]:
    """The shape of the samples of a sound file, and these. Raises ``ImageRefused``."""
    from octavo.images.audio_files import samples_of  # only here: images need no numpy

    samples = samples_of(data, **settings)
    return [(1, 1, len(samples) // SAMPLE_BYTES)], samples


def serve(question: bytes) -> tuple[bytes, bytes]:
    """The prepared image, video or sound, or why there is none."""
    (size,) = LENGTH.unpack_from(question)
    settings = json.loads(question[LENGTH.size : LENGTH.size + size])
    content = question[LENGTH.size + size :]
    head: Any
    try:
        if "audio" in settings:
            head, pixels = sound(content, settings["audio"])
        elif "sizes" in settings:
            ends = accumulate(settings["sizes"], initial=0)
            files = [content[start:end] for start, end in pairwise(ends)]
            *head, pixels = prepared_frames(files, settings)
        else:
            *head, pixels = prepared(content, settings)
    except ImageRefused as refused:
        return REFUSED, str(refused).encode()
    encoded = json.dumps(head).encode()
    return RENDERED, LENGTH.pack(len(encoded)) + encoded + pixels


def main() -> None:
    started = start()
    if started is not None:
        connection, settings = started
        ChildWorker(connection, settings).run_bytes(serve)


if __name__ == "__main__":
    main()
