"""Receives request bodies: bounds their size and time, singly and in total, and decodes large ones in a thread.

Where API keys compete for room or for time, each has a share.
"""

from __future__ import annotations

import asyncio
import contextlib
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import TypeVar

import msgspec
from starlette.requests import Request

from octavo.errors import RequestTooLarge, Unavailable
from octavo_server.http.body_decoder import SMALL_BYTES, BodyDecoder
from octavo_server.http.connection import ByteBudget, Share
from octavo_server.http.errors import RETRY_AFTER_SECONDS, HTTPRefusal, printable
from octavo_server.tenants.api_keys import caller_of
from octavo_server.tenants.places import Places

BODY_SECONDS = 60
"""Most seconds for a body to arrive; slower clients would hold memory."""
SPARE_BYTES = 4 << 20
"""Room for other bodies in addition to one of the maximum size."""
MAX_SPOOLED_BYTES = 512 << 20
"""Of all bodies that arrive on disk."""
PART_BYTES = 256 << 10
"""Written to disk at a time."""
PIECE_BYTES = 64 << 10
"""Most bytes decompressed at a time."""
PIECE_SECONDS = 0.002
"""Pause after each piece (64 to 320 KiB) of a large body, shared by all arriving bodies."""
GZIP_OR_ZLIB = 32 + zlib.MAX_WBITS
OF_BROWSERS = ("origin", "sec-fetch-site", "referer")
"""Headers of which a browser sends at least one with every request that a page of another site makes it post."""
DECODED = ("gzip", "x-gzip", "deflate")

T = TypeVar("T")
Body = TypeVar("Body", bound=msgspec.Struct)


class BodyReceiver:
    """Reads the bodies of an application's requests, each of at most ``max_bytes``."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._budget = ByteBudget(max_bytes + SPARE_BYTES)
        self._spooled = ByteBudget(MAX_SPOOLED_BYTES)
        self._pace = Places(1)
        # One at a time: decoding two at once would hold the GIL twice as long and take twice the memory.
        self._decoding = Places(1)

    async def read_json(
        self, request: Request, decoder: BodyDecoder[Body], max_model_len: int
    ) -> tuple[Body, list[str]]:
        """Decode a JSON body with ``decoder``; see ``BodyDecoder.read``. Raises ``RequestError``.

        Other media types are rejected as a defence against cross-site requests: a web page can make a browser post a
        form or plain text to this server, but not JSON. Ollama's clients may send any, as ``curl -d`` does in its
        documentation, unless there is a sign of a browser.
        """
        media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        is_json = media_type == "application/json" or media_type.endswith("+json")
        is_ollama = request.url.path.startswith("/api/") and not any(name in request.headers for name in OF_BROWSERS)
        if not is_json and not is_ollama:
            message = "The body must be sent with 'Content-Type: application/json'."
            raise HTTPRefusal(400, message, "unsupported_media_type")
        return await self.read(request, lambda body: decoder.read(body, max_model_len))

    async def read(self, request: Request, decode: Callable[[bytes], T]) -> T:
        """Apply ``decode`` to the body, in a thread unless it is small. Raises ``RequestError``."""
        # A growing buffer per body would fragment the heap.
        pieces: list[bytes] = []
        async with self._received(request, self._budget, pieces.append):
            body = b"".join(pieces)
            pieces.clear()
            if len(body) <= SMALL_BYTES:
                return decode(body)
            async with self._decoding.place(caller_of(request).name):
                return await asyncio.to_thread(decode, body)

    async def spool(self, request: Request, take: Callable[[bytes], None]) -> None:
        """Give ``take``, which keeps it on disk, the body in parts, in a thread. Raises ``RequestError``."""
        part = bytearray()

        def collect(piece: bytes) -> Awaitable[None] | None:
            nonlocal part
            part += piece
            if len(part) < PART_BYTES:
                return None
            whole, part = part, bytearray()
            return asyncio.to_thread(take, bytes(whole))

        async with self._received(request, self._spooled, collect):
            await asyncio.to_thread(take, bytes(part))

    @contextlib.asynccontextmanager
    async def _received(
        self, request: Request, budget: ByteBudget, take: Callable[[bytes], Awaitable[None] | None]
    ) -> AsyncIterator[None]:
        """``take`` has the complete body; it counts towards ``budget`` until the context exits."""
        try:
            async with asyncio.timeout(BODY_SECONDS) as deadline:
                share = budget.share(lambda: deadline.reschedule(0), caller_of(request).name)
                try:
                    await self._receive(request, share, take)
                except BaseException:
                    share.resize(0)
                    raise
                share.settle()
        except TimeoutError:
            if share.is_given_up:
                raise _given_up() from None
            message = f"The body did not arrive within {BODY_SECONDS} seconds."
            raise HTTPRefusal(408, message, "request_timeout") from None
        try:
            yield
        finally:
            share.resize(0)

    async def _receive(self, request: Request, share: Share, take: Callable[[bytes], Awaitable[None] | None]) -> None:
        """Read the body. Raises ``RequestTooLarge`` as soon as its compressed or decompressed size passes the limit."""
        too_large = RequestTooLarge(
            f"The body is larger than {self._max_bytes} bytes, the most that this server accepts."
        )
        declared = request.headers.get("content-length", "")
        if declared.isascii() and declared.isdigit() and len(declared) < 20 and int(declared) > self._max_bytes:
            raise too_large
        unpacking = _Unpacking(request.headers.get("content-encoding", ""))
        owner, size = caller_of(request).name, 0
        async for chunk in request.stream():
            for piece in unpacking.pieces(chunk):
                size += len(piece)
                if size > self._max_bytes:
                    raise too_large
                if (written := take(piece)) is not None:
                    await written
                share.resize(size)
                if share.is_given_up:
                    raise _given_up()
                if size > PIECE_BYTES:
                    # Limits the CPU share of large bodies, however many connections send them.
                    async with self._pace.place(owner):
                        await asyncio.sleep(PIECE_SECONDS)
        unpacking.end()


class _Unpacking:
    """Decoder of a ``Content-Encoding``. Raises ``HTTPRefusal`` if it is unknown."""

    def __init__(self, coding: str) -> None:
        self._decompressor = None
        name = coding.strip().lower()
        if name in DECODED:
            self._decompressor = zlib.decompressobj(GZIP_OR_ZLIB)
        elif name not in ("", "identity"):
            message = (
                f"The body must be sent plainly, or with 'Content-Encoding' gzip or deflate, not {printable(name)}."
            )
            raise HTTPRefusal(415, message, "unsupported_content_encoding")

    def pieces(self, chunk: bytes) -> Iterator[bytes]:
        if self._decompressor is None:
            yield chunk
            return
        while chunk and not self._decompressor.eof:
            try:
                yield self._decompressor.decompress(chunk, PIECE_BYTES)
            except zlib.error:
                raise _badly_packed() from None
            chunk = self._decompressor.unconsumed_tail
        if chunk or self._decompressor.unused_data:
            raise _badly_packed()

    def end(self) -> None:
        if self._decompressor is not None and not self._decompressor.eof:
            raise _badly_packed()


def _badly_packed() -> HTTPRefusal:
    return HTTPRefusal(400, "The body is not what its 'Content-Encoding' says, or not all of it.", "invalid_encoding")


def _given_up() -> Unavailable:
    message = "The server is busy: the bodies that are arriving are too large together. Try again shortly."
    return Unavailable(message, retry_after=RETRY_AFTER_SECONDS)
