"""Pooled HTTP/1.1 connections to one server, for many streams of small pieces.

General clients spend several times as long on each piece of a body.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import select
import ssl
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Any
from urllib.parse import urlsplit

from octavo_fleet.proxy.response_parser import ConnectionFailed, Headers, InvalidResponse, ResponseParser

CONNECT_SECONDS = 5.0
SILENT_SECONDS = 600.0
"""Time from a request to the end of the response's head, and then between pieces of its body."""
IDLE_SECONDS = 4.0
"""Idle connections are used for this long; servers usually close them after 5 s or more."""
MAX_BUFFERED = 64 << 10
"""Received bytes that were not read yet, after which a connection is not read from."""
MAX_WHOLE_BODY = 64 << 20
"""Longest body that is kept as a whole, unless the caller says otherwise."""
MAX_PART = 16 << 20
"""Bytes of the longest line or event of a stream."""

__all__ = ["Connection", "ConnectionFailed", "Connections", "Headers", "InvalidResponse", "ServerSilent"]


class NotConnected(ConnectionFailed):
    """There is no connection, so that nothing was sent."""


class ServerSilent(ConnectionFailed):
    """The server accepted a request, and then sent nothing for too long."""


class Connection(asyncio.Protocol):
    """One connection, and the response that arrives on it."""

    def __init__(self, silent_seconds: float) -> None:
        self.idle_since = 0.0
        self._silent_seconds = silent_seconds
        self._transport: Any
        self._now: Callable[[], float]
        """The loop's time."""
        self._response: ResponseParser | None = None
        """``None`` between requests, when the server has nothing to say."""
        self._is_paused = False
        self._failure: ConnectionFailed | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._last_heard = 0.0
        """Loop time at which the request was sent, or a piece of the body arrived."""
        self._silence: asyncio.TimerHandle | None = None

    # --- requests ---

    async def send(self, data: bytes) -> None:
        """Send a request and wait for the head of its response: ``status`` and ``headers``. Raises
        ``ConnectionFailed``."""
        self._raise_failure()
        self._response = ResponseParser()
        self._last_heard = self._now()
        self._silence = asyncio.get_running_loop().call_later(self._silent_seconds, self._check_silence)
        self._transport.write(data)
        while not self._response.has_head:
            await self._wait()

    @property
    def status(self) -> int:
        return self._current.status

    @property
    def headers(self) -> Headers:
        return self._current.headers

    async def read(self) -> bytes:
        """The bytes of the body that arrived since the last call, at least one; b"" at the end. Raises
        ``ConnectionFailed``."""
        response = self._current
        while not response.num_buffered:
            if response.is_complete:
                return b""
            await self._wait()
        data = response.take()
        self._resume()
        return data

    async def read_all(self, max_bytes: int = MAX_WHOLE_BODY) -> bytes:
        """The body up to its end. Raises ``ConnectionFailed``, also if it is longer than ``max_bytes``."""
        pieces, num_bytes = [], 0
        while data := await self.read():
            pieces.append(data)
            num_bytes += len(data)
            if num_bytes > max_bytes:
                raise InvalidResponse(f"a body of more than {max_bytes:,} bytes")
        return b"".join(pieces)

    async def divided(self, end: bytes) -> AsyncIterator[bytes]:
        """The lines or events of the body, each without the ``end`` behind it; one that is not ended is dropped.
        Raises ``ConnectionFailed``, also for one of more than ``MAX_PART``."""
        rest = b""
        while data := await self.read():
            *parts, rest = (rest + data).split(end)
            if len(rest) > MAX_PART:
                raise InvalidResponse(f"a line or an event of more than {MAX_PART >> 20} MiB")
            for part in parts:
                yield part

    @property
    def is_reusable(self) -> bool:
        """Whether request and response are complete, so that another request may be sent."""
        is_over = self._response is not None and self._response.may_keep_alive
        return is_over and not self.is_closed and not self._transport.get_write_buffer_size()

    def release(self) -> None:
        """Forget the response, with what was left unread of it: the connection is idle."""
        self._end_response()
        self._response = None
        self._resume()
        self.idle_since = time.monotonic()

    @property
    def is_closed(self) -> bool:
        return self._failure is not None or self._transport.is_closing()

    @property
    def is_readable(self) -> bool:
        """Whether an idle connection was closed, or spoke unasked, which the event loop has not seen yet."""
        poll = select.poll()
        poll.register(self._transport.get_extra_info("socket").fileno(), select.POLLIN)
        return bool(poll.poll(0))

    def close(self) -> None:
        """Close at once; a request in progress is thereby aborted."""
        self._end_response()
        self._transport.abort()

    @property
    def _current(self) -> ResponseParser:
        assert self._response is not None
        return self._response

    async def _wait(self) -> None:
        self._raise_failure()
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _resume(self) -> None:
        if self._is_paused:
            self._is_paused = False
            self._last_heard = self._now()
            self._transport.resume_reading()

    def _end_response(self) -> None:
        if self._silence is not None:
            self._silence.cancel()
            self._silence = None

    # --- called by the event loop ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._now = asyncio.get_running_loop().time

    def data_received(self, data: bytes) -> None:
        response = self._response
        if response is None:
            self._give_up(InvalidResponse("it sent data that no request had asked for"))
            return
        try:
            response.feed(data)
        except InvalidResponse as error:
            self._give_up(error)
            return
        if response.has_head:
            self._last_heard = self._now()
        if response.is_followed:
            self._transport.abort()
        elif response.num_buffered > MAX_BUFFERED and not self._is_paused:
            self._is_paused = True
            self._transport.pause_reading()
        self._wake()

    def connection_lost(self, error: Exception | None) -> None:
        if self._response is not None and error is None:
            self._response.end()
        self._end_response()
        self._fail(ConnectionFailed("the connection was closed" if error is None else type(error).__name__))

    def _check_silence(self) -> None:
        now = self._now()
        if self._is_paused:  # the silence is that of this side
            self._last_heard = now
        left = self._last_heard + self._silent_seconds - now
        if left > 0:
            self._silence = asyncio.get_running_loop().call_later(left, self._check_silence)
        elif not self._current.is_complete:
            self._give_up(ServerSilent(f"nothing arrived for {self._silent_seconds:g} s"))

    def _give_up(self, failure: ConnectionFailed) -> None:
        self._fail(failure)
        self._transport.abort()

    def _fail(self, failure: ConnectionFailed) -> None:
        self._failure = self._failure or failure
        self._wake()


class Connections:
    """The connections to one server; there are as many as requests at once."""

    def __init__(self, url: str, silent_seconds: float = SILENT_SECONDS) -> None:
        """``url`` ends with a slash."""
        self._silent_seconds = silent_seconds
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
            if connection.is_reusable:
                connection.release()
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
            if not connection.is_closed and not connection.is_readable:
                return connection
            connection.close()
        return None

    async def _connect(self) -> Connection:
        loop = asyncio.get_running_loop()
        name = self._host if self._is_secure else None
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                make = functools.partial(Connection, self._silent_seconds)
                _, connection = await loop.create_connection(
                    make, self._host, self._port, ssl=self._ssl, server_hostname=name
                )
        except (OSError, TimeoutError) as error:
            raise NotConnected(str(error) or type(error).__name__) from None
        return connection
