"""Pixels that the engine process has already, so that they are not sent again with each turn of a conversation.

Both ends of the socket note the same images in the same order and forget the same ones, so the front process knows what
the engine process still has without asking.
"""

from __future__ import annotations

from collections import OrderedDict

import msgspec

from octavo.types import ImageInput, Request

MOST_BYTES = 128 << 20
"""Of pixels that are kept."""


class KeptPixels:
    """The images of the requests that came last, by digest; only the engine process's end has their pixels."""

    def __init__(self, has_pixels: bool, most_bytes: int = MOST_BYTES) -> None:
        self._has_pixels, self._most, self._num_bytes = has_pixels, most_bytes, 0
        self._kept: OrderedDict[bytes, tuple[int, bytes]] = OrderedDict()
        """The size of each, and its pixels."""

    def without_known(self, request: Request) -> Request:
        """The request as it is sent: images that are kept come without pixels."""
        if not any(image.digest in self._kept for image in request.images):
            return request
        images = [
            msgspec.structs.replace(image, pixels=b"") if image.digest in self._kept else image
            for image in request.images
        ]
        return msgspec.structs.replace(request, images=images)

    def with_known(self, request: Request) -> Request:
        """The request that was meant, with the pixels of all images."""
        if all(image.pixels for image in request.images):
            return request
        images = [
            image if image.pixels else msgspec.structs.replace(image, pixels=self._kept[image.digest][1])
            for image in request.images
        ]
        return msgspec.structs.replace(request, images=images)

    def note(self, images: list[ImageInput]) -> None:
        """Keep the images of a request that was sent, whole ones; forget those that rested longest."""
        for image in images:
            if image.digest in self._kept:
                self._kept.move_to_end(image.digest)
                continue
            size = len(image.pixels)
            self._kept[image.digest] = size, image.pixels if self._has_pixels else b""
            self._num_bytes += size
            while self._num_bytes > self._most:
                self._num_bytes -= self._kept.popitem(last=False)[1][0]
