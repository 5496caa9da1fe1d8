"""What a client may send on one connection: heads, trailers and pauses are bounded while they arrive.

The parser keeps the line that it reads, however long it becomes, and uvicorn every header; neither has a bound.
"""

from __future__ import annotations

import http
import uuid
from typing import Any

import httptools
from starlette.responses import Response
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from octavo.errors import RequestError, Unavailable
from octavo.server.byte_budget import ByteBudget
from octavo.server.errors import HTTPRefusal, error_response

MAX_HEAD_BYTES = 32 << 10
"""Of the request line and all headers, and of the trailers of a chunked body."""
MAX_HEADERS = 100
HEAD_SECONDS = 30
MESSAGE_SECONDS = 90
"""From the end of the head to the end of the body. An application that reads the body has a closer bound."""
MAX_PIPELINED = 16
"""Requests on a connection that wait for the answer to an earlier one."""
MAX_UNREAD_BYTES = 1 << 20
"""Of a body that arrives after its answer was sent. Closing at once could lose the answer on its way."""


class BoundedProtocol(HttpToolsProtocol):
    """A connection that is refused and closed as soon as it passes one of the bounds.

    ``heads`` bounds the unfinished heads of all connections together, ``max_connections`` their number.
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
        """When what is arriving must have arrived; ``None`` between requests."""
        self._is_in_head = False
        self._num_headers = 0
        self._num_head_bytes = 0
        """Of whole headers and of the URL."""
        self._num_pending_bytes = 0
        """Received since anything of the message was whole: of one long line, for example."""
        self._num_received = 0
        """Of an unfinished head, and up to one packet more."""
        self._num_unread_bytes = 0

    # --- what is received ---

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
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
        self._share.resize(0)

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        if self.parser is None or self.transport.is_closing():
            return
        if self._deadline is None:
            self._deadline = self.loop.time() + HEAD_SECONDS
        self._num_pending_bytes += len(data)
        try:
            self._feed(data)
        except httptools.HttpParserError as error:
            cause = error.__context__
            malformed = HTTPRefusal(400, "The request is not valid HTTP.", "malformed_request")
            self._refuse(cause if isinstance(cause, RequestError) else malformed)
            return
        if self._num_pending_bytes > MAX_HEAD_BYTES:
            self._refuse(_head_too_large())
            return
        self._num_received += len(data)
        self._share.resize(self._num_received if self._is_in_head else self._num_pending_bytes)

    def _feed(self, data: bytes) -> None:
        while data:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                method = self.parser.get_method()
                if method == b"CONNECT":
                    raise httptools.HttpParserError("CONNECT") from None
                # A server may pass over an offer of another protocol (RFC 9110, section 7.8), but the parser takes it
                # for granted and stops. So it gets the head once more without the offer, and then what follows.
                head = [b"%b %b HTTP/%b" % (method, self.url, self.parser.get_http_version().encode())]
                head += [name + b": " + value for name, value in _without_upgrade(self.headers)]
                data = b"\r\n".join(head) + b"\r\n\r\n" + data[upgrade.args[0] :]
                self.parser = httptools.HttpRequestParser(self)
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)

    # --- what the parser finds in it ---

    def on_message_begin(self) -> None:
        if len(self.pipeline) >= MAX_PIPELINED:
            raise _busy("too many requests wait on this connection")
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
        # Trailers come when the application has its headers already, and nothing here asks for any.
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
        self._is_in_head = False
        self._num_headers = self._num_head_bytes = self._num_pending_bytes = self._num_unread_bytes = 0
        self._deadline = self.loop.time() + MESSAGE_SECONDS
        super().on_headers_complete()

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
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.cycle.response_complete:
            # What was not read must not be kept as long as the connection.
            self.cycle.body = bytearray()

    # --- refusals ---

    def close_if_late(self, now: float) -> None:
        """Close a connection whose client lets the server wait for the rest of a request. A pause that the server asked
        for is none of the client's."""
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
        """Answer with ``error`` if nothing else is being answered, and close the connection."""
        self._share.resize(0)
        if _is_idle(self) or (self.cycle.more_body and not self.cycle.response_started and not self.pipeline):
            self.transport.write(_answer(error))
        self.transport.close()


def _is_idle(connection: Any) -> bool:
    """Whether no request of a connection is being answered."""
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
    """A whole answer, for requests that the application does not see."""
    response: Response = error_response(error)
    response.headers["x-request-id"] = uuid.uuid4().hex
    response.headers["connection"] = "close"
    phrase = http.HTTPStatus(error.status).phrase
    lines = [f"HTTP/1.1 {error.status} {phrase}".encode()]
    lines += [name + b": " + value for name, value in response.raw_headers]
    return b"\r\n".join(lines) + b"\r\n\r\n" + bytes(response.body)
