"""Relays one request to the upstream and its response to the client, unchanged.

What a stream gets when the upstream fails after the first byte: an error event and ``[DONE]``, as a stream of an engine
does. Before the first byte, the request is retried, and fails with 503. Another response is cut, if a part of it was
sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from typing import NamedTuple
from urllib.parse import quote, unquote_plus

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from octavo.errors import DeadlineExceeded, RequestError, Unavailable
from octavo_fleet.proxy.connections import ConnectionFailed, Headers, InvalidResponse
from octavo_fleet.proxy.metering import Meter
from octavo_fleet.proxy.upstream import Upstream, UpstreamAnswer, failure_of
from octavo_server.dialects.anthropic.answer import ERRORS as ANTHROPIC
from octavo_server.dialects.gemini.endpoints import gemini_error
from octavo_server.generation import ClientGone
from octavo_server.http.error_responses import error_object
from octavo_server.http.response import DONE, leave_all
from octavo_server.http.server import WRITE_PIECE, WritePiece
from octavo_server.tenants.api_keys import Caller

HOP_BY_HOP = frozenset(
    {
        *(b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"te", b"trailer"),
        *(b"transfer-encoding", b"upgrade"),
    }
)
"""RFC 9110, section 7.6.1."""
NOT_SENT = HOP_BY_HOP | {b"host", b"content-length", b"content-encoding", b"accept-encoding", b"expect"}
"""Bodies are sent decompressed, and asked for uncompressed, so that their tokens can be counted."""
OF_THE_ORIGIN = frozenset(
    {
        *(b"access-control-allow-origin", b"access-control-allow-credentials", b"access-control-allow-headers"),
        *(b"access-control-allow-methods", b"access-control-expose-headers", b"access-control-max-age"),
        *(b"alt-svc", b"clear-site-data", b"location", b"refresh", b"set-cookie", b"strict-transport-security"),
    }
)
"""Headers that tell a client what to do with this server's address, and not what the response is."""
NOT_RELAYED = HOP_BY_HOP | OF_THE_ORIGIN | {b"content-length", b"x-request-id", b"date", b"server"}
MAX_EVENT_BYTES = 16 << 20
"""Longest line of a stream; an upstream that sends a longer one has failed."""
LAST_SECONDS = 1.0
"""Time in which a client must read the error that ends its stream."""

logger = logging.getLogger("octavo.server")


class Outgoing(NamedTuple):
    """A request as it is sent upstream."""

    method: str
    path: str
    target: str
    """Path and query, relative to the upstream's URL: a path such as //host cannot change the server."""
    headers: Headers
    body: bytes


def outgoing(scope: Scope, body: bytes, key: str | None, keeps_key: bool) -> Outgoing:
    """The request of ``scope``, with the upstream's ``key``; without one, with the client's if ``keeps_key``."""
    fields = scope["query_string"].decode("latin-1").split("&")
    dropped = NOT_SENT | _named_by_connection(scope["headers"])
    if not (keeps_key and key is None):
        dropped |= {b"authorization", b"x-api-key", b"x-goog-api-key"}
        fields = [field for field in fields if unquote_plus(field.partition("=")[0]) != "key"]
    query = "&".join(fields)
    headers = [(name, value) for name, value in scope["headers"] if name not in dropped]
    headers.append((b"accept-encoding", b"identity"))
    if key is not None:
        headers.append((b"authorization", b"Bearer " + key.encode()))
    target = quote(scope["path"].lstrip("/"), safe="/:@") + (f"?{query}" if query else "")
    # A HEAD is a GET whose body this server leaves out.
    method = "GET" if scope["method"] == "HEAD" else scope["method"]
    return Outgoing(method, scope["path"], target, headers, body)


def _named_by_connection(headers: Headers) -> frozenset[bytes]:
    """Headers that are for one connection only because a ``Connection`` header names them."""
    named = [value.lower().split(b",") for name, value in headers if name.lower() == b"connection"]
    return frozenset(name.strip() for names in named for name in names)


class Relay(Response):
    """The response to one request of ``caller``, who is charged; it has ``timeout`` seconds."""

    def __init__(self, upstream: Upstream, request: Outgoing, caller: Caller, timeout: float | None) -> None:
        self.upstream = upstream
        self.request = request
        self.caller = caller
        self.timeout = timeout
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = asyncio.create_task(self._exchange(scope, send))
        watcher = asyncio.create_task(_disconnected(receive))
        try:
            await asyncio.wait({exchange, watcher}, return_when=asyncio.FIRST_COMPLETED)
            if not exchange.done():
                raise ClientGone
            if exchange.cancelled():
                raise _shut_down()
            exchange.result()
        finally:
            watcher.cancel()
            exchange.cancel()
            await asyncio.gather(exchange, return_exceptions=True)  # closes the connection, so the upstream aborts

    async def _exchange(self, scope: Scope, send: Send) -> None:
        upstream, request = self.upstream, self.request
        arrival = time.monotonic()
        upstream.check_room(self.caller.name, len(request.body))
        if request.method == "POST":
            self.caller.account.admit()
        try:
            async with (
                asyncio.timeout(self.timeout) as limit,
                upstream.place(self.caller.name, len(request.body)),
                upstream.open(
                    request.method, request.target, request.headers, request.body, self.caller.name
                ) as answer,
            ):
                with contextlib.closing(Meter(upstream.metrics, self.caller.account, arrival)) as meter:
                    await self._relay(answer, meter, limit, scope, send)
        except TimeoutError:
            assert self.timeout is not None
            raise DeadlineExceeded(self.timeout) from None

    async def _relay(
        self, answer: UpstreamAnswer, meter: Meter, limit: asyncio.Timeout, scope: Scope, send: Send
    ) -> None:
        dropped = NOT_RELAYED | _named_by_connection(answer.headers)
        headers = [(name, value) for name, value in answer.headers if name.lower() not in dropped]
        if answer.is_whole:
            headers.append((b"content-length", b"%d" % len(answer.first)))
        elif not answer.is_stream:
            headers += [header for header in answer.headers if header[0].lower() == b"content-length"]
        await send({"type": "http.response.start", "status": answer.status, "headers": headers})
        try:
            if scope["method"] == "HEAD":
                meter.end("stop")
                await send({"type": "http.response.body", "body": b""})
            elif answer.is_stream:
                await self._stream(answer, meter, scope.get(WRITE_PIECE, leave_all), send)
            else:
                await self._copy(answer, meter, send)
        except ConnectionFailed as failure:
            logger.warning("the upstream failed in the middle of a response: %s", failure)
            await self._end(failure_of(failure), answer, meter, send)
        except asyncio.CancelledError:
            if limit.expired() and self.timeout is not None:
                await self._end(DeadlineExceeded(self.timeout), answer, meter, send)
            elif self.upstream.is_stopped:
                await self._end(_shut_down(), answer, meter, send)
            else:
                raise

    async def _copy(self, answer: UpstreamAnswer, meter: Meter, send: Send) -> None:
        """Relay a response that is no stream."""
        piece = answer.first
        while not answer.is_whole:
            meter.part(piece)
            await send({"type": "http.response.body", "body": piece, "more_body": True})
            piece = await answer.read()
            answer.is_whole = not piece
        meter.part(piece)
        meter.whole(answer.status)
        await send({"type": "http.response.body", "body": piece})

    async def _stream(self, answer: UpstreamAnswer, meter: Meter, write: WritePiece, send: Send) -> None:
        piece = answer.first
        while piece:
            meter.piece(piece)
            if meter.event_bytes > MAX_EVENT_BYTES:
                raise InvalidResponse(f"an event of more than {MAX_EVENT_BYTES >> 20} MiB")
            if not write(piece):
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            answer.last = piece
            piece = await answer.read()
        meter.end("stop")
        await send({"type": "http.response.body", "body": b""})

    async def _end(self, error: RequestError, answer: UpstreamAnswer, meter: Meter, send: Send) -> None:
        """End a response whose head was sent: a stream with an error event, another by closing the connection."""
        meter.end("error")
        if answer.is_stream:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LAST_SECONDS):
                    await send({"type": "http.response.body", "body": self._error_frames(error, answer.last)})

    def _error_frames(self, error: RequestError, last: bytes) -> bytes:
        """The events that end a stream; ``last`` may have ended inside an event, which is then ended first."""
        end = b"" if last.endswith(b"\n\n") else b"\n\n"
        if self.request.path in ANTHROPIC.paths:
            return end + b"event: error\ndata: " + msgspec.json.encode(ANTHROPIC.body(error)) + b"\n\n"
        if self.request.path.startswith("/v1beta/"):
            told = msgspec.json.encode(gemini_error(error))
            return end + told + b"\n\ndata: " + told + b"\n\n"  # as a server itself tells it
        return end + b"data: " + msgspec.json.encode(error_object(error)) + b"\n\n" + DONE


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _shut_down() -> Unavailable:
    return Unavailable("The server shut down before this request was finished.")
