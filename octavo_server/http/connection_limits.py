"""Limits on what a client may send on one connection: sizes of heads and trailers, and time.

The limits apply while data arrives, because the parser buffers a line and uvicorn all headers without a limit.
"""

from __future__ import annotations

import http
import uuid
from collections import Counter
from collections.abc import Callable
from typing import Any

import httptools
from starlette.responses import Response
from uvicorn._types import ASGI3Application
from uvicorn.config import Config
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from octavo.errors import RequestError, Unavailable
from octavo_server.http.error_responses import HTTPRefusal, error_response


class ByteBudget:
    """Limits the bytes held by incomplete requests of all connections to ``limit`` in total.

    When their sum exceeds it, the largest share of the API key that holds most is revoked, so that clients with small
    requests are served however much others send.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.num_bytes = 0
        self._shares: set[Share] = set()
        """Non-empty shares of incomplete requests, which may be revoked."""

    def share(self, give_up: Callable[[], None], owner: str = "") -> Share:
        """A new empty share of the API key ``owner``. ``give_up`` is called at most once, when the share is revoked and
        no longer counts."""
        return Share(self, give_up, owner)

    def _resize(self, share: Share, num_bytes: int) -> None:
        self.num_bytes += num_bytes - share.num_bytes
        share.num_bytes = num_bytes
        if num_bytes and not share.is_complete:
            self._shares.add(share)
        else:
            self._shares.discard(share)
        while self.num_bytes > self.limit and self._shares:
            totals: Counter[str] = Counter()
            for one in self._shares:
                totals[one.owner] += one.num_bytes
            largest = max(self._shares, key=lambda one: (totals[one.owner], one.num_bytes))
            largest.is_given_up = True
            self._resize(largest, 0)
            largest._give_up()


def _nothing() -> None:
    pass


class Share:
    """The bytes held by one request."""

    def __init__(self, budget: ByteBudget, give_up: Callable[[], None], owner: str) -> None:
        self.owner = owner
        self.num_bytes = 0
        self.is_given_up = False
        self.is_complete = False
        self._budget = budget
        self._give_up = give_up

    def resize(self, num_bytes: int) -> None:
        """Set the share's size; without effect once it was revoked."""
        if not self.is_given_up and num_bytes != self.num_bytes:
            self._budget._resize(self, num_bytes)

    def end(self) -> None:
        """Hold nothing from now on, not even what was to be given up: it refers to this share."""
        self.resize(0)
        self._give_up = _nothing

    def settle(self) -> None:
        """Mark the request as complete: it still counts, but can no longer be revoked."""
        self.is_complete = True
        self._budget._shares.discard(self)


MAX_HEAD_BYTES = 32 << 10
"""Of the URL and all headers together, and separately of the trailers of a chunked body."""
MAX_HEADERS = 100
HEAD_SECONDS = 30
MESSAGE_SECONDS = 90
"""From the end of the head to the end of the body; ``BodyReceiver`` sets a stricter limit when it reads the body."""
MAX_PIPELINED = 16
"""Pipelined requests that wait for an earlier response; while there are so many, a connection is not read from."""
PARSED_BYTES = 4 << 10
"""Bytes that are parsed at once, unless a head ends before; the parser cannot be stopped in between."""
END_OF_HEAD = b"\r\n\r\n"
MAX_UNREAD_BYTES = 1 << 20
"""Body bytes accepted after the response was sent. Closing at once could lose the response in transit."""


class HoldableFlow(FlowControl):
    """Flow control in which reading can be held whatever the application asks for."""

    is_held = False

    def resume_reading(self) -> None:
        if not self.is_held:
            super().resume_reading()


class BoundedProtocol(HttpToolsProtocol):
    """A connection that is rejected and closed as soon as it exceeds a limit.

    ``heads`` limits the incomplete heads of all connections in total, ``max_connections`` the number of connections.
    """

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: Any = None,
        *,
        heads: ByteBudget,
        max_connections: int,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._share = heads.share(lambda: self._refuse(_busy("too many unfinished requests")))
        self._max_connections = max_connections
        self._deadline: float | None = None
        """Loop time by which the current head or body must be complete; ``None`` between requests."""
        self._is_in_head = self._is_in_body = False
        self._num_headers = 0
        self._num_head_bytes = 0
        """Of complete headers and of the URL."""
        self._num_pending_bytes = 0
        """Received since the parser last completed an element, for example of one long header line."""
        self._num_received = 0
        """Bytes of an incomplete head, overcounted by at most one packet."""
        self._num_unread_bytes = 0
        self._unparsed = b""
        """What arrived after as many requests as may wait."""
        self._running: RequestResponseCycle | None = None
        """The request that the application answers now, or answered last."""
        self._refusal: RequestError | None = None
        """Answer to what came while a response was in progress; it follows that response, and nothing more is read."""

    # --- transport callbacks ---

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.flow = self._flow = HoldableFlow(transport)
        self._deadline = self.loop.time() + HEAD_SECONDS
        if len(self.connections) > self._max_connections:
            idle = next((one for one in self.connections if one is not self and _is_idle(one)), None)
            if idle is None:
                self._refuse(_busy("too many connections"))
            else:
                self.connections.discard(idle)
                idle.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._share.end()
        self._unparsed = b""
        # uvicorn tells only the last of several pipelined requests.
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True
            self._running.message_event.set()

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        if self.parser is None or self.transport.is_closing() or self._refusal is not None:
            return
        if self._deadline is None:
            self._deadline = self.loop.time() + HEAD_SECONDS
        self._parse(self._unparsed + data)

    def _parse(self, data: bytes) -> None:
        """Parse ``data`` until as many requests wait as may; the rest is parsed when there is room."""
        try:
            self._unparsed = self._feed(data)
        except httptools.HttpParserError as error:
            cause = error.__context__
            malformed = HTTPRefusal(400, "The request is not valid HTTP.", "malformed_request")
            self._refuse(cause if isinstance(cause, RequestError) else malformed)
            return
        if self._num_pending_bytes > MAX_HEAD_BYTES:
            self._refuse(_head_too_large())
            return
        if self._unparsed:
            self._flow.is_held = True
            self.flow.pause_reading()
        head = self._num_received if self._is_in_head else self._num_pending_bytes
        self._share.resize(head + len(self._unparsed))

    def _feed(self, data: bytes) -> bytes:
        """Feed the parser; returns what it did not get."""
        start = 0
        while start < len(data) and len(self.pipeline) < MAX_PIPELINED:
            end = start + PARSED_BYTES
            if not self._is_in_body and (end_of_head := data.find(END_OF_HEAD, start, end)) >= 0:
                end = end_of_head + len(END_OF_HEAD)
            piece = data[start:end]
            self._num_pending_bytes += len(piece)
            try:
                self.parser.feed_data(piece)
                start = end
            except httptools.HttpParserUpgrade as upgrade:
                method = self.parser.get_method()
                if method == b"CONNECT":
                    raise httptools.HttpParserError("CONNECT") from None
                # A server may ignore an upgrade (RFC 9110, section 7.8), but the parser stops after one. So feed a new
                # parser the head without the upgrade headers, and then the remaining data.
                head = [b"%b %b HTTP/%b" % (method, self.url, self.parser.get_http_version().encode())]
                head += [name + b": " + value for name, value in _without_upgrade(self.headers)]
                data = b"\r\n".join(head) + b"\r\n\r\n" + data[start + upgrade.args[0] :]
                start = 0
                self.parser = httptools.HttpRequestParser(self)
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
            self._num_received += len(piece)
        return data[start:]

    # --- parser callbacks ---

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._is_in_head = True
        self._deadline = self.loop.time() + HEAD_SECONDS
        self._num_headers = self._num_head_bytes = self._num_received = 0

    def on_url(self, url: bytes) -> None:
        self._count_head(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._num_headers += 1
        self._count_head(len(name) + len(value))
        # Trailers are dropped: the application already has its headers.
        if self._is_in_head:
            super().on_header(name, value)

    def _count_head(self, num_bytes: int) -> None:
        self._num_head_bytes += num_bytes
        self._num_pending_bytes = 0
        if self._num_head_bytes > MAX_HEAD_BYTES or self._num_headers > MAX_HEADERS:
            raise _head_too_large()

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        self._is_in_head, self._is_in_body = False, True
        self._num_headers = self._num_head_bytes = self._num_pending_bytes = self._num_unread_bytes = 0
        self._deadline = self.loop.time() + MESSAGE_SECONDS
        super().on_headers_complete()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def on_body(self, body: bytes) -> None:
        self._num_pending_bytes = 0
        super().on_body(body)
        if self.cycle.response_complete:
            self._num_unread_bytes += len(body)
            if self._num_unread_bytes > MAX_UNREAD_BYTES:
                self.transport.close()

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        self._num_pending_bytes = 0
        self._deadline = None
        self._is_in_body = False
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.cycle.response_complete:
            # Free unread body bytes: the cycle lives as long as the connection.
            self.cycle.body = bytearray()
        if self._refusal is not None and _is_idle(self) and not self.transport.is_closing():
            self._refuse(self._refusal)
        if self._unparsed and len(self.pipeline) < MAX_PIPELINED and not self.transport.is_closing():
            self._unset_keepalive_if_required()
            self._flow.is_held = False
            self._parse(self._unparsed)
            self.flow.resume_reading()

    # --- takeover ---

    @property
    def is_between_requests(self) -> bool:
        """Whether no part of a request was received since the last response was sent completely."""
        is_body_missing = self.cycle is not None and self.cycle.more_body
        is_begun = self._is_in_head or self._num_pending_bytes > 0 or bool(self._unparsed)
        is_written = not self.transport.is_closing() and not self.transport.get_write_buffer_size()
        return _is_idle(self) and not is_body_missing and not is_begun and is_written

    # --- refusals ---

    def close_if_late(self, now: float) -> None:
        """Close a connection whose request is past its deadline. Time in which the server paused reading does not
        count."""
        if self._deadline is None or now < self._deadline or self.transport.is_closing():
            return
        if self.flow.read_paused:
            self._deadline = now + MESSAGE_SECONDS
        elif self._is_in_head:
            message = f"The head of the request did not arrive within {HEAD_SECONDS} seconds."
            self._refuse(HTTPRefusal(408, message, "request_timeout"))
        else:
            self.transport.close()

    def _refuse(self, error: RequestError) -> None:
        """Send ``error``, after the response to a complete request that is in progress, and close the connection."""
        self._share.resize(0)
        self._unparsed = b""
        self._deadline = None
        if not _is_idle(self) and not self.cycle.more_body:
            self._refusal = error
            return
        if _is_idle(self) or (self.cycle.more_body and not self.cycle.response_started and not self.pipeline):
            self.transport.write(_answer(error))
        self.transport.close()


def _is_idle(connection: Any) -> bool:
    """Whether no response is in progress or pending on a connection."""
    return connection.cycle is None or (connection.cycle.response_complete and not connection.pipeline)


def _head_too_large() -> HTTPRefusal:
    message = f"The headers are too large: at most {MAX_HEADERS} with {MAX_HEAD_BYTES} bytes are accepted."
    return HTTPRefusal(431, message, "headers_too_large")


def _busy(what: str) -> Unavailable:
    return Unavailable(f"The server is busy: {what}.")


def _without_upgrade(headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    kept = [(name, value) for name, value in headers if name not in (b"upgrade", b"connection", b"http2-settings")]
    options = [
        option.strip().lower() for name, value in headers if name == b"connection" for option in value.split(b",")
    ]
    kept_options = {b"close", b"keep-alive"}.intersection(options)
    return [*kept, *((b"connection", option) for option in kept_options)]


def _answer(error: RequestError) -> bytes:
    """A complete HTTP response, for requests that do not reach the application."""
    response: Response = error_response(error)
    response.headers["x-request-id"] = uuid.uuid4().hex
    response.headers["connection"] = "close"
    phrase = http.HTTPStatus(error.status).phrase
    lines = [f"HTTP/1.1 {error.status} {phrase}".encode()]
    lines += [name + b": " + value for name, value in response.raw_headers]
    return b"\r\n".join(lines) + b"\r\n\r\n" + bytes(response.body)
