"""Pooled HTTP/1.1 connections to one server, for many streams of small pieces.

The parser is httptools, as in the HTTP server; general clients spend several times as long on each piece of a body.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import time
from collections import deque
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import urlsplit

import httptools

CONNECT_SECONDS = 5.0
IDLE_SECONDS = 4.0
"""Idle connections are used for this long; servers usually close them after 5 s or more."""
MAX_BUFFERED = 256 << 10
"""Received bytes that were not read yet, after which a connection is not read from."""

Headers = list[tuple[bytes, bytes]]


class ConnectionFailed(Exception):
    """The server cannot be reached, closed the connection before the end of its response, or sent no valid HTTP."""


class Connection(asyncio.Protocol):
    """One connection, and the response that arrives on it."""

    def __init__(self) -> None:
        self.idle_since = 0.0
        self.status = 0
        self.headers: Headers = []
        self.is_reusable = False
        """Whether the response is complete and another request may be sent."""
        self._transport: Any
        self._parser = httptools.HttpResponseParser(self)
        self._pieces: list[bytes] = []
        self._num_buffered = 0
        self._is_paused = False
        self._has_head = False
        self._has_length = False
        self._is_complete = False
        self._failure: ConnectionFailed | None = None
        self._waiter: asyncio.Future[None] | None = None

    # --- requests ---

    async def send(self, data: bytes) -> None:
        """Send a request and wait for the head of its response: ``status`` and ``headers``. Raises
        ``ConnectionFailed``."""
        self._has_head = self._has_length = self._is_complete = self.is_reusable = False
        self._transport.write(data)
        while not self._has_head:
            await self._wait()

    async def read(self) -> bytes:
        """The bytes of the body that arrived since the last call, at least one; b"" at the end. Raises
        ``ConnectionFailed``."""
        while not self._pieces:
            if self._is_complete:
                return b""
            await self._wait()
        data = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
        self.discard()
        return data

    def discard(self) -> None:
        """Drop what was received, so that no other request reads it."""
        self._pieces.clear()
        self._num_buffered = 0
        if self._is_paused:
            self._is_paused = False
            self._transport.resume_reading()

    @property
    def is_closed(self) -> bool:
        return self._failure is not None or self._transport.is_closing()

    def close(self) -> None:
        """Close at once; a request in progress is thereby aborted."""
        self._transport.abort()

    async def _wait(self) -> None:
        if self._failure is not None:
            raise self._failure
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # --- called by the event loop ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(f"invalid HTTP: {error}")
            self._transport.abort()
        if self._num_buffered > MAX_BUFFERED and not self._is_paused:
            self._is_paused = True
            self._transport.pause_reading()
        self._wake()

    def connection_lost(self, error: Exception | None) -> None:
        if self._has_head and not self._has_length and error is None:
            self._is_complete = True  # RFC 9112, section 6.3: such a body ends with the connection
        self._fail("the connection was closed" if error is None else type(error).__name__)
        self._wake()

    def _fail(self, reason: str) -> None:
        self.is_reusable = False
        self._failure = self._failure or ConnectionFailed(reason)

    # --- called by the parser ---

    def on_message_begin(self) -> None:
        self.headers = []

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name, value))
        if name.lower() in (b"content-length", b"transfer-encoding"):
            self._has_length = True

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()
        self._has_head = self.status >= 200  # others precede the response

    def on_body(self, data: bytes) -> None:
        self._pieces.append(data)
        self._num_buffered += len(data)

    def on_message_complete(self) -> None:
        if self._has_head:
            self._is_complete = True
            self.is_reusable = self._parser.should_keep_alive()


class Connections:
    """The connections to one server; there are as many as requests at once."""

    def __init__(self, url: str) -> None:
        """``url`` ends with a slash."""
        parts = urlsplit(url)
        self._is_secure = parts.scheme == "https"
        self._host, self._port = parts.hostname or "", parts.port or (443 if self._is_secure else 80)
        self._base = parts.path
        self._head = b"host: " + parts.netloc.rpartition("@")[2].encode() + b"\r\n"
        self._ssl = ssl.create_default_context() if self._is_secure else None
        self._idle: deque[Connection] = deque()

    @contextlib.asynccontextmanager
    async def request(
        self, method: str, target: str, headers: Headers | None = None, body: bytes = b""
    ) -> AsyncIterator[Connection]:
        """Send a request for ``target``, relative to the URL; the head of the response is there on entry.

        Raises ``ConnectionFailed``. Leaving before the end of the body aborts the request.
        """
        lines = [b"%b %b HTTP/1.1\r\n" % (method.encode(), (self._base + target).encode()), self._head]
        lines += [b"%b: %b\r\n" % header for header in headers or ()]
        lines.append(b"content-length: %d\r\n\r\n" % len(body))
        connection = self._take() or await self._connect()
        try:
            await connection.send(b"".join((*lines, body)))
            yield connection
        finally:
            if connection.is_reusable and not connection.is_closed:
                connection.discard()
                connection.idle_since = time.monotonic()
                self._idle.append(connection)
            else:
                connection.close()

    def close(self) -> None:
        """Close the idle connections."""
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    def _take(self) -> Connection | None:
        """The idle connection that was used last; those that are too old are closed."""
        newest_to_close = time.monotonic() - IDLE_SECONDS
        while self._idle and (self._idle[0].is_closed or self._idle[0].idle_since < newest_to_close):
            self._idle.popleft().close()
        while self._idle:
            connection = self._idle.pop()
            if not connection.is_closed:
                return connection
        return None

    async def _connect(self) -> Connection:
        loop = asyncio.get_running_loop()
        name = self._host if self._is_secure else None
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                _, connection = await loop.create_connection(
                    Connection, self._host, self._port, ssl=self._ssl, server_hostname=name
                )
        except (OSError, TimeoutError) as error:
            raise ConnectionFailed(str(error) or type(error).__name__) from None
        return connection
