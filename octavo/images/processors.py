"""How a model's images are resized, and what stands for them, and for videos and audio, in a prompt."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from octavo.images.audio import SAMPLE_BYTES, AudioForm
from octavo.images.resizing import limited, low
from octavo.images.videos import Frames, VideoForm
from octavo.text.conversation import ImageText
from octavo.types import AUDIO_DETAILS, ImageInput

PIXTRAL_ENDS = "[IMG_BREAK]", "[IMG_END]"
AROUND_TILE, WHOLE, LINE, LINES = "<fake_token_around_image>", "<global-img>", "\n", "\n\n"
"""Tokens of Idefics 3."""
TILE_END = "<|IMG_LINE_BREAK|>"
"""Of Command A Vision."""
LLAMA4_MARKS = "<|tile_x_separator|>", "<|tile_y_separator|>", "<|image|>"
SLICE_MARKS = "<image>", "</image>", "<slice>", "</slice>"
NUMBER_MARKS = "<image_id>", "</image_id>"
"""Of MiniCPM-V."""
LFM_PLACE, LFM_WHOLE = "<|img_row_{}_col_{}|>", "<|img_thumbnail|>"


@dataclass(frozen=True)
class PreparedImage:
    """A resized image, or audio: its samples are its pixels."""

    shape: tuple[int, int, int]
    details: tuple[int, ...]
    pixels: bytes
    elapsed: int | None = None
    """See ``ImageInput``."""

    @functools.cached_property
    def digest(self) -> bytes:
        """SHA-256 of the pixels."""
        return hashlib.sha256(self.pixels).digest()

    @property
    def is_audio(self) -> bool:
        return self.details == AUDIO_DETAILS


@dataclass(frozen=True)
class PreparedClip:
    """The frames of a video as images, or audio, and what the model reads in place of its placeholder."""

    images: list[PreparedImage]
    written: str


def by_size(processor: ImageProcessor, image: PreparedImage) -> list[int]:
    """An embedding for each square of pixels."""
    return [processor.token] * math.prod(processor.grid(image))


def in_rows(processor: ImageProcessor, image: PreparedImage) -> list[int]:
    """An embedding for each square of pixels, and a token behind each row (Pixtral)."""
    rows, columns = processor.grid(image)
    row = [*[processor.token] * columns, processor.vocabulary[PIXTRAL_ENDS[0]]]
    return [*(row * rows)[:-1], processor.vocabulary[PIXTRAL_ENDS[1]]]


def by_tile(processor: ImageProcessor, image: PreparedImage) -> list[int]:
    """As many embeddings for each tile."""
    return [processor.token] * (processor.num_tokens * image.shape[0])


def in_lines(processor: ImageProcessor, image: PreparedImage) -> list[int]:
    """The embeddings of the entire image, and those of its tiles line by line, each with an embedding behind it; of a
    frame of a video a quarter, and one behind the last frame."""
    if len(image.details) == 1:
        return [processor.token] * (quarter(processor.settings["cells"]) + image.details[0])
    *_, rows, columns = image.details
    return [processor.token] * (processor.num_tokens + rows * (columns + 1))


def in_two_views(processor: ImageProcessor, image: PreparedImage) -> list[int]:
    """The embeddings of the entire image line by line, one between, and those of its tiles line by line; one ends each
    line (DeepSeek-VL2)."""
    cells, (rows, columns) = processor.settings["cells"], image.details
    return [processor.token] * (cells * (cells + 1) + 1 + rows * cells * (columns * cells + 1))


def in_views(processor: ImageProcessor, image: PreparedImage) -> list[int]:
    """The embeddings of an image's tiles, if there are any, of the entire image, and one behind them; in DeepSeek-OCR
    one ends each line."""
    settings, (rows, columns, *_) = processor.settings, image.details
    cells, ends = settings["cells"], settings["line_end"]
    return [processor.token] * (rows * cells * (columns * cells + ends) + settings["whole"])


def in_slices(processor: ImageProcessor, image: PreparedImage) -> list[int]:
    """The entire image and then its slices, each between two tokens, with an end of line between rows of slices
    (MiniCPM-V)."""
    rows, columns, slice_height, slice_width, height, width = image.details
    token, factor = [processor.token], processor.settings["factor"]
    begin, end, begin_slice, end_slice = (processor.vocabulary[text] for text in SLICE_MARKS)
    whole = [begin, *token * (height // factor * (width // factor)), end]
    row = [begin_slice, *token * (slice_height // factor * (slice_width // factor)), end_slice] * columns
    return [*whole, *([*row, processor.vocabulary[LINE]] * rows)[:-1]]


def quarter(cells: int) -> int:
    """Embeddings of a frame with ``cells`` patches in a row."""
    return math.ceil(cells / 2) ** 2


def in_split(processor: ImageProcessor, image: PreparedImage) -> list[int]:
    """Each tile behind tokens that say which one it is, and at last the entire image (Idefics 3)."""
    vocabulary, (rows, columns) = processor.vocabulary, image.details
    around, found = vocabulary[AROUND_TILE], list[int]()
    for row in range(1, rows + 1):
        for column in range(1, columns + 1):
            found += [around, vocabulary[place_of(row, column)], *[processor.token] * processor.num_tokens]
        if row < rows:
            found.append(vocabulary[LINE])
    if rows:
        found += [vocabulary[LINES]] if LINES in vocabulary else [vocabulary[LINE]] * 2
    return [*found, around, vocabulary[WHOLE], *[processor.token] * processor.num_tokens, around]


def in_named(processor: ImageProcessor, image: PreparedImage) -> list[int]:
    """As many embeddings for each tile, behind the tile's number, and of the entire image behind its name (Aya
    Vision)."""
    count, vocabulary = image.shape[0], processor.vocabulary
    names = [*(f"TILE_{number}" for number in range(1, count)), "TILE_GLOBAL"]
    return [token for name in names for token in (vocabulary[name], *[processor.token] * processor.num_tokens)]


def in_ended(processor: ImageProcessor, image: PreparedImage) -> list[int]:
    """As many embeddings for each tile, and a token behind them (Command A Vision)."""
    tile = [*[processor.token] * processor.num_tokens, processor.vocabulary[TILE_END]]
    return tile * image.shape[0]


def in_separated(processor: ImageProcessor, image: PreparedImage) -> list[int]:
    """Tiles with a token between those of a row and one behind each row, then the entire image (Llama 4)."""
    vocabulary, (rows, columns) = processor.vocabulary, image.details
    between, behind, whole = (vocabulary[text] for text in LLAMA4_MARKS)
    tile = [processor.token] * processor.num_tokens
    row = [*tile, *[between, *tile] * (columns - 1), behind]
    return [*(row * rows if rows * columns > 1 else []), whole, *tile]


def in_places(processor: ImageProcessor, image: PreparedImage) -> list[int]:
    """Each tile behind a token that says which one it is, and the entire image of its own size (LFM2-VL)."""
    rows, columns, *_, height, width = image.details
    vocabulary, found = processor.vocabulary, list[int]()
    for row in range(1, rows + 1):
        for column in range(1, columns + 1):
            found += [vocabulary[LFM_PLACE.format(row, column)], *[processor.token] * processor.num_tokens]
    factor = processor.settings["whole"]["factor"]
    whole = [processor.token] * (height // factor * (width // factor))
    return [*found, *([vocabulary[LFM_WHOLE]] if rows else []), *whole]


def place_of(row: int, column: int) -> str:
    """The token before a tile."""
    return f"<row_{row}_col_{column}>"


@dataclass(frozen=True, kw_only=True)
class ImageProcessor:
    """See the module's docstring. ``settings`` are those of ``images.image_decoder.prepared``."""

    settings: Mapping[str, Any]
    mean: tuple[float, ...]
    deviation: tuple[float, ...]
    placeholder: str
    """What the chat template writes for an image."""
    around: tuple[str, str] = ("", "")
    """What the template writes next to it."""
    before: str = ""
    after: str = ""
    """Text that the processor puts around what stands for an image."""
    token: int
    """Id of the token at each embedding's position."""
    token_text: str = ""
    """Its text in the vocabulary, if that is not the placeholder."""
    side: int = 0
    """Pixels of the side of an embedding, where images differ in size."""
    has_grid: bool = False
    """Whether rotary positions count rows and columns."""
    most_in_tiles: int = 0
    """Images of a request that are cut into several tiles, if there are no more; 0: however many there are."""
    num_tokens: int = 0
    """Embeddings of a tile, where all have as many."""
    vocabulary: Mapping[str, int] = field(default_factory=dict)
    """Ids of tokens that ``layout`` puts between embeddings, by their text."""
    is_prefix: bool = False
    """Whether all of a prompt with an image attends to all of it, as in PaliGemma, whose prompts have one."""
    is_numbered: bool = False
    """Whether each image of a prompt has its number before it."""
    layout: Callable[[ImageProcessor, PreparedImage], list[int]] = by_size
    """The ids that stand for an image."""
    video: VideoForm | None = None
    """``None`` for a family that has no videos."""
    audio: AudioForm | None = None
    """``None`` for a family that has no audio."""

    @property
    def takes_images(self) -> bool:
        """Whether the model reads images, and not audio alone."""
        return bool(self.placeholder)

    @property
    def most_tokens(self) -> int:
        """Embeddings of the largest image of a model in which these attend to each other."""
        return self.num_tokens or (self.settings["most"] if self.settings["rule"] == "squares" else 0)

    @property
    def image_text(self) -> ImageText:
        """How prompts have images."""
        alone = f"{self.around[0]}{self.written}{self.around[1]}"
        video, audio = (form.placeholder if form else "" for form in (self.video, self.audio))
        return ImageText(self.placeholder, self.written, alone, video, audio)

    @property
    def written(self) -> str:
        """What the model reads in place of the placeholder, with one token for all embeddings of an image."""
        return f"{self.before}{self.token_text or self.placeholder}{self.after}"

    def settings_for(self, detail: str) -> dict[str, Any]:
        """The settings for a client's ``detail``."""
        return low(dict(self.settings)) if detail == "low" else dict(self.settings)

    def detail_of(self, detail: str, count: int) -> str:
        """The ``detail`` of each of a request's ``count`` images, of which a client asked for one."""
        return "low" if 0 < self.most_in_tiles < count else detail

    def limited(self, most_tokens: int) -> ImageProcessor:
        """A processor whose images have no more than so many tokens, as far as their size can be chosen."""
        video = self.video and self.video.limited(most_tokens)
        audio = self.audio and self.audio.limited(most_tokens)
        settings = limited(dict(self.settings), most_tokens)
        return dataclasses.replace(self, settings=settings, video=video, audio=audio)

    def video_of(self, frames: Frames) -> PreparedClip:
        """A video of a family that has any; frames that are missing in the last group are like the last one."""
        assert self.video is not None
        count, rows, columns = frames.shape
        size, group = rows * columns * 3, self.video.group
        images = []
        for start in range(0, count, group):
            end = start + group if self.video.fills_groups else min(start + group, count)
            members = [min(place, count - 1) * size for place in range(start, end)]
            pixels = b"".join(frames.pixels[place : place + size] for place in members)
            details = self.video.details(start + group >= count)
            elapsed = self.video.elapsed(frames, start // group)
            images.append(PreparedImage((len(members), rows, columns), details, pixels, elapsed))
        return PreparedClip(images, self.video.written(frames, self.token_text or self.placeholder))

    def audio_of(self, samples: bytes) -> PreparedClip:
        """Audio, of samples as ``ImageInput`` has them, for a family that has any."""
        assert self.audio is not None
        samples = samples.ljust(self.audio.least_samples * SAMPLE_BYTES, b"\0")
        image = PreparedImage((1, 1, len(samples) // SAMPLE_BYTES), AUDIO_DETAILS, samples)
        return PreparedClip([image], self.audio.written)

    def tokens(self, image: PreparedImage) -> list[int]:
        """The ids that stand for an image or audio."""
        if image.is_audio:
            assert self.audio is not None
            return [self.audio.token] * self.audio.count(image.shape[2])
        return self.layout(self, image)

    def token_of(self, image: PreparedImage) -> int:
        """The id at the position of each embedding."""
        return self.audio.token if image.is_audio and self.audio is not None else self.token

    def number(self, index: int) -> list[int]:
        """The ids before the image with this index in the prompt (MiniCPM-V)."""
        if not self.is_numbered:
            return []
        begin, end = (self.vocabulary[text] for text in NUMBER_MARKS)
        return [begin, *(self.vocabulary[digit] for digit in str(index)), end]

    def placed(self, image: PreparedImage, start: int) -> ImageInput:
        """An image whose first token is at ``start``."""
        known = [dict(self.settings), self.mean, self.deviation, image.shape, image.details, image.elapsed]
        digest = hashlib.sha256(json.dumps(known, sort_keys=True).encode() + b"\0" + image.digest).digest()
        return ImageInput(
            start,
            len(self.tokens(image)),
            self.token_of(image),
            digest,
            image.shape,
            image.pixels,
            image.details,
            grid=self.grid(image) if self.has_grid and not image.is_audio else None,
            elapsed=image.elapsed,
        )

    def over(self, image: ImageInput, prompt: list[int]) -> ImageInput:
        """The image of a prompt that attends to all of itself: what is computed of any position is of this prompt."""
        said = hashlib.sha256(image.digest + array("q", prompt).tobytes()).digest()
        return msgspec.structs.replace(image, start=0, num_tokens=len(prompt), digest=said)

    def grid(self, image: PreparedImage) -> tuple[int, int]:
        """Rows and columns of embeddings."""
        return image.shape[1] // self.side, image.shape[2] // self.side
