"""The images, videos and audio of requests: from where they are to resized pixels."""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence

from octavo.config import ModelSettings
from octavo.errors import InvalidParameter
from octavo.images.media_sources import (
    MediaHosts,
    Part,
    Resolve,
    Source,
    audio_source,
    kind_of,
    source_of,
    video_sources,
)
from octavo.images.preparer import ImagePreparer, PreparedMedia, from_data_url, placed, preparer_of
from octavo.images.processors import PreparedClip, PreparedImage
from octavo.server_settings import ServerSettings
from octavo.text.conversation import ChatPrompt, ImageText
from octavo.types import ImageInput
from octavo_server.tenants.turn_queue import Places

MOST_PREPARED_BYTES = 48 << 20
"""Of the resized images of a request, which go to the engine process in one message."""
MOST_KEPT_BYTES = 128 << 20
"""Of resized images and audio that are kept, as a conversation brings its own again with each message."""
MARKDOWN_IMAGE = re.compile(r"!\[(?:(?!!\[)[^\]\n])*+\]\(([^()\s]++)\)")
"""How Text Generation Inference writes an image in a prompt. No part of a text is read again: it may be long."""

ReadFile = Callable[[str], Awaitable[bytes | None]]
"""Reads a caller's uploaded file by id; ``None`` if there is none."""


class MarkedText:
    """A text of a client with images, for models whose prompts have images anywhere."""

    def __init__(self, text: str, image_text: ImageText, field: str) -> None:
        pieces = MARKDOWN_IMAGE.split(text)
        self.images: list[Part] = [({"image_url": url}, f"{field}: image {i}") for i, url in enumerate(pieces[1::2])]
        self._text = "".join(image_text.alone if i % 2 else piece for i, piece in enumerate(pieces))

    def __call__(self) -> ChatPrompt:
        return ChatPrompt(self._text, self._text, images=tuple(range(len(self.images))))


class KeptImages:
    """The images and audio that were prepared last, by who sent them: how soon an answer comes tells nobody what others
    sent."""

    def __init__(self, most_bytes: int = MOST_KEPT_BYTES) -> None:
        self._most, self._num_bytes = most_bytes, 0
        self._images: OrderedDict[tuple[str, str, bytes], PreparedMedia] = OrderedDict()

    async def prepared(
        self,
        owner: str,
        source: Source,
        read: Callable[[], Awaitable[bytes]],
        prepare: Callable[[bytes], PreparedMedia],
    ) -> PreparedMedia:
        """The image or audio of a source, prepared unless it is kept; ``read`` gives its bytes. A data: URL that is
        known is not decoded. Raises as ``read`` and ``prepare``, which is called in a thread, do."""
        given = source.value if source.kind == "data" else await read()
        digest = await asyncio.to_thread(_digest, given)
        key = owner, source.detail, digest
        if key in self._images:
            self._images.move_to_end(key)
            return self._images[key]
        data = await read() if isinstance(given, str) else given
        image = await asyncio.to_thread(prepare, data)
        if key not in self._images:  # else it came twice at once
            self._images[key] = image
            self._num_bytes += num_bytes_of(image)
            while self._num_bytes > self._most:
                self._num_bytes -= num_bytes_of(self._images.popitem(last=False)[1])
        return image


def num_bytes_of(media: PreparedMedia) -> int:
    """The bytes of an image, or of all that a video or audio has."""
    return sum(len(image.pixels) for image in (media.images if isinstance(media, PreparedClip) else [media]))


def _digest(content: str | bytes) -> bytes:
    return hashlib.sha256(content.encode() if isinstance(content, str) else content).digest()


class ImageFiles:
    """Gets and prepares the images of one model's requests."""

    def __init__(
        self,
        model: ModelSettings,
        settings: ServerSettings,
        num_slots: Callable[[], int],
        resolve: Resolve | None = None,
    ) -> None:
        """``num_slots``: those of the engine, known once it is ready; 0: its model takes no images."""
        self._model, self._num_slots = model, num_slots
        self._most_images, self._most_bytes = settings.max_images, settings.max_image_bytes
        self._hosts = MediaHosts(settings.allowed_media_domains, settings.max_image_bytes, resolve)
        self._preparer: ImagePreparer | None = None
        self._is_read = False
        self._kept = KeptImages()
        self._places = Places(4, 2)

    @property
    def preparer(self) -> ImagePreparer | None:
        """``None`` for a model that takes no images."""
        if not self._is_read and self._num_slots():
            self._is_read, self._preparer = True, preparer_of(self._model, self._num_slots())
        return self._preparer

    @property
    def image_text(self) -> ImageText | None:
        """How the model's prompts have images; ``None`` if it takes none."""
        return None if self.preparer is None else self.preparer.processor.image_text

    async def prepare(self, parts: Sequence[Part], owner: str, read_file: ReadFile | None) -> list[PreparedMedia]:
        """The images and videos, resized, and audio, in the order of ``parts``. Raises ``RequestError``."""
        preparer = self.preparer
        assert preparer is not None, "only models with a tower have parts that are images"
        if len(parts) > self._most_images:
            message = f"A request may have {self._most_images} images, videos or audio; this one has {len(parts)}."
            raise InvalidParameter("messages", message)
        found: list[PreparedMedia] = []
        num_bytes, num_images = 0, sum(kind_of(part) == "image" for part in parts)
        for part in parts:
            async with self._places.place(owner):
                media = await self._prepared(preparer, part, num_images, owner, read_file)
            num_bytes += num_bytes_of(media)
            if num_bytes > MOST_PREPARED_BYTES:
                what = "images" if num_images else "videos and audio"
                message = (
                    f"The {what} of the request have more than {MOST_PREPARED_BYTES >> 20} MiB once they are read."
                )
                raise InvalidParameter("messages", message)
            found.append(media)
        return found

    async def _prepared(
        self, preparer: ImagePreparer, part: Part, num_images: int, owner: str, read_file: ReadFile | None
    ) -> PreparedMedia:
        kind = kind_of(part)
        if kind != "video":
            source = source_of(part) if kind == "image" else audio_source(part)
            detail = preparer.processor.detail_of(source.detail, num_images) if kind == "image" else kind
            return await self._kept.prepared(
                owner,
                source._replace(detail=detail),
                lambda: self._content(source, read_file),
                lambda data: (
                    preparer.prepare(data, detail, source.where)
                    if kind == "image"
                    else preparer.prepare_audio(data, source.where)
                ),
            )
        sources, rate = video_sources(part)
        files = [await self._content(source, read_file) for source in sources]
        if (num_bytes := sum(map(len, files))) > self._most_bytes:
            message = f"'{part[1]}': the video has {num_bytes} bytes; at most {self._most_bytes} are allowed."
            raise InvalidParameter("messages", message)
        return await asyncio.to_thread(preparer.prepare_video, files, rate, part[1])

    def placed(self, tokens: list[int], images: Sequence[PreparedImage]) -> tuple[list[int], list[ImageInput]]:
        """See ``images.preparer.placed``."""
        assert self.preparer is not None
        return placed(tokens, images, self.preparer.processor)

    def close(self) -> None:
        """End the child processes."""
        if self._preparer is not None:
            self._preparer.close()

    async def _content(self, source: Source, read_file: ReadFile | None) -> bytes:
        """The bytes of a file. Raises ``InvalidParameter``."""
        if source.kind == "data":
            data = await asyncio.to_thread(from_data_url, source.value, source.where)
        elif source.kind == "file":
            content = None if read_file is None else await read_file(source.value)
            if content is None:
                raise InvalidParameter("messages", f"'{source.where}': there is no file with this 'file_id'.")
            data = content
        else:
            data = await self._hosts.fetched(source)
        if len(data) > self._most_bytes:
            message = f"'{source.where}': the file has {len(data)} bytes; at most {self._most_bytes} are allowed."
            raise InvalidParameter("messages", message)
        return data
