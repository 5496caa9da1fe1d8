"""Relays one request to the upstream and its response to the client, unchanged.

What a stream gets when the upstream fails after the first byte: an error event and ``[DONE]``, as a stream of an engine
does. Before the first byte, the request is retried, and fails with 503.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from typing import NamedTuple
from urllib.parse import quote

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from octavo.errors import RequestError, Unavailable
from octavo.server.errors import ANTHROPIC_PATH, anthropic_error, error_object
from octavo.server.generation import ClientGone
from octavo.server.http import WRITE_PIECE, WritePiece
from octavo.server.proxy.connections import ConnectionFailed, Headers
from octavo.server.proxy.metering import Meter
from octavo.server.proxy.upstream import Answer, Upstream
from octavo.server.quotas import Account
from octavo.server.sse import DONE

HOP_BY_HOP = frozenset(
    {
        *(b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"te", b"trailer"),
        *(b"transfer-encoding", b"upgrade"),
    }
)
"""RFC 9110, section 7.6.1."""
NOT_SENT = HOP_BY_HOP | {b"host", b"content-length", b"content-encoding", b"accept-encoding", b"expect"}
"""Bodies are sent decompressed, and asked for uncompressed, so that their tokens can be counted."""
NOT_RELAYED = HOP_BY_HOP | {b"content-length", b"x-request-id", b"date", b"server"}

logger = logging.getLogger("octavo.server")


class UpstreamFailed(RequestError):
    """The upstream failed after the first byte of a response."""

    status = 502
    type = "server_error"
    code = "upstream_failed"


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
    query = scope["query_string"].decode("latin-1")
    dropped = NOT_SENT if keeps_key and key is None else NOT_SENT | {b"authorization", b"x-api-key"}
    headers = [(name, value) for name, value in scope["headers"] if name not in dropped]
    headers.append((b"accept-encoding", b"identity"))
    if key is not None:
        headers.append((b"authorization", b"Bearer " + key.encode()))
    target = quote(scope["path"].lstrip("/"), safe="/:@") + (f"?{query}" if query else "")
    # A HEAD is a GET whose body this server leaves out.
    method = "GET" if scope["method"] == "HEAD" else scope["method"]
    return Outgoing(method, scope["path"], target, headers, body)


class Relay(Response):
    """The response to one request; ``account`` is charged for it."""

    def __init__(self, upstream: Upstream, request: Outgoing, account: Account) -> None:
        self.upstream = upstream
        self.request = request
        self.account = account
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
        upstream.check_room()
        if request.method == "POST":
            self.account.admit()
        async with (
            upstream.place(),
            upstream.open(request.method, request.target, request.headers, request.body) as answer,
        ):
            with contextlib.closing(Meter(upstream.metrics, self.account, arrival)) as meter:
                await self._relay(answer, meter, scope, send)

    async def _relay(self, answer: Answer, meter: Meter, scope: Scope, send: Send) -> None:
        headers = [(name, value) for name, value in answer.headers if name.lower() not in NOT_RELAYED]
        if not answer.is_stream:
            headers.append((b"content-length", b"%d" % len(answer.first)))
        await send({"type": "http.response.start", "status": answer.status, "headers": headers})
        if answer.is_stream:
            await self._stream(answer, meter, scope.get(WRITE_PIECE, _leave_all), send)
        else:
            meter.whole(answer.status, answer.first)
            await send({"type": "http.response.body", "body": answer.first})

    async def _stream(self, answer: Answer, meter: Meter, write: WritePiece, send: Send) -> None:
        last = b""
        error: RequestError | None = None
        try:
            piece = answer.first
            while piece:
                meter.piece(piece)
                if not write(piece):
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
                last = piece
                piece = await answer.read()
        except ConnectionFailed as failure:
            logger.warning("the upstream failed in the middle of a stream: %s", failure)
            error = UpstreamFailed("The upstream server failed before this response was finished.")
        except asyncio.CancelledError:
            if not self.upstream.is_stopped:
                raise
            error = _shut_down()
        meter.end("stop" if error is None else "error")
        data = b"" if error is None else self._error_frames(error, last)
        await send({"type": "http.response.body", "body": data, "more_body": False})

    def _error_frames(self, error: RequestError, last: bytes) -> bytes:
        """The events that end a stream; ``last`` may have ended inside an event, which is then ended first."""
        end = b"" if last.endswith(b"\n\n") else b"\n\n"
        if self.request.path == ANTHROPIC_PATH:
            return end + b"event: error\ndata: " + msgspec.json.encode(anthropic_error(error)) + b"\n\n"
        return end + b"data: " + msgspec.json.encode(error_object(error)) + b"\n\n" + DONE


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _shut_down() -> Unavailable:
    return Unavailable("The server shut down before this request was finished.")


def _leave_all(data: bytes) -> bool:
    return False
