"""Images and audio of earlier requests, as a conversation brings its own again with each message."""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Awaitable, Callable

from octavo.images.media_sources import Source
from octavo.images.preparer import PreparedMedia
from octavo.images.processors import PreparedClip

MOST_KEPT_BYTES = 128 << 20
"""Of images once they are resized, and of audio."""


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
