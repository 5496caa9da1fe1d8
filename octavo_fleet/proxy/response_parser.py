"""Reads one HTTP/1.1 response out of bytes, within limits: a server may send anything, and without an end.

The parser is httptools, as in the HTTP server. It buffers a line without a limit, and accepts statuses and encodings
that a proxy cannot pass on, so these are checked here.
"""

from __future__ import annotations

import httptools

MAX_HEAD_BYTES = 64 << 10
"""Of all headers of a response together: of its head, of interim responses before it, and trailers."""
MAX_HEADERS = 100
MAX_INTERIM_RESPONSES = 10
"""Responses with a status of 1xx, which precede the real one."""
VERSIONS = ("1.0", "1.1")
WITHOUT_BODY = (204, 304)

Headers = list[tuple[bytes, bytes]]


class ConnectionFailed(Exception):
    """The server cannot be reached, or closed the connection before the end of its response."""


class InvalidResponse(ConnectionFailed):
    """What the server sent is no valid HTTP response, or exceeds a limit."""


class ResponseParser:
    """One response, whose bytes are given to ``feed`` as they arrive."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: Headers = []
        self.has_head = False
        """Whether ``status`` and ``headers`` are complete."""
        self.is_complete = False
        self.is_followed = False
        """Whether more arrived after the end of the response, which belongs to no request."""
        self.num_buffered = 0
        """Bytes of the body that were not taken yet."""
        self._pieces: list[bytes] = []
        self._parser = httptools.HttpResponseParser(self)
        self._keeps_alive = False
        self._is_delimited = False
        self._num_pending = 0
        """Bytes since the parser last completed an element, overcounted by at most one call of ``feed``."""
        self._num_head_bytes = self._num_headers = self._num_interim = 0

    @property
    def may_keep_alive(self) -> bool:
        """Whether another response may follow on the connection: this one ended, and nothing came after it."""
        return self.is_complete and self._is_delimited and self._keeps_alive and not self.is_followed

    def feed(self, data: bytes) -> None:
        """Read the next bytes. Raises ``InvalidResponse``; what was read before remains."""
        if self.is_complete:
            self.is_followed = True
            return
        self._num_pending += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            if self.is_complete:
                self.is_followed = True
                return
            cause = error.__context__
            raise cause if isinstance(cause, InvalidResponse) else InvalidResponse(f"invalid HTTP: {error}") from None
        if self._num_pending > MAX_HEAD_BYTES:
            raise _too_large()

    def end(self) -> None:
        """The connection was closed; a body without a length ends with it (RFC 9112, section 6.3)."""
        if self.has_head and not self._is_delimited:
            self.is_complete = True

    def take(self) -> bytes:
        """The bytes of the body that arrived since the last call."""
        data = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
        self._pieces.clear()
        self.num_buffered = 0
        return data

    # --- called by the parser ---

    def on_message_begin(self) -> None:
        if self.is_complete:
            raise InvalidResponse("more than one response")
        self.headers = []

    def on_header(self, name: bytes, value: bytes) -> None:
        self._num_pending = 0
        self._num_headers += 1
        self._num_head_bytes += len(name) + len(value)
        if self._num_headers > MAX_HEADERS or self._num_head_bytes > MAX_HEAD_BYTES:
            raise _too_large()
        if b"\r" in value or b"\n" in value or b"\0" in value:
            raise InvalidResponse("a header with a line break")
        if not self.has_head:  # else it is a trailer, which is dropped
            self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        self._num_pending = 0
        status = self._parser.get_status_code()
        if 100 <= status < 200 and status != 101:  # 101 would end HTTP, and no request asks for that
            self._num_interim += 1
            if self._num_interim > MAX_INTERIM_RESPONSES:
                raise InvalidResponse(f"more than {MAX_INTERIM_RESPONSES} interim responses")
            return
        if not 200 <= status < 600:
            raise InvalidResponse(f"a status of {status}")
        if self._parser.get_http_version() not in VERSIONS:
            raise InvalidResponse(f"a version of HTTP/{self._parser.get_http_version()}")
        self._is_delimited = status in WITHOUT_BODY or self._has_length()
        self.status, self.has_head = status, True

    def on_body(self, data: bytes) -> None:
        self._num_pending = 0
        self._pieces.append(data)
        self.num_buffered += len(data)

    def on_message_complete(self) -> None:
        self._num_pending = 0
        if self.has_head:  # else it was an interim response
            self.is_complete = True
            self._keeps_alive = self._parser.should_keep_alive()

    def _has_length(self) -> bool:
        """Whether the body's end can be told; two statements of it are refused, as two readers may differ in them."""
        lengths = [value for name, value in self.headers if name.lower() == b"content-length"]
        encodings = [value for name, value in self.headers if name.lower() == b"transfer-encoding"]
        if len(lengths) + len(encodings) > 1:
            raise InvalidResponse("more than one length of the body")
        if encodings and (encodings[0].lower() != b"chunked" or self._parser.get_http_version() == "1.0"):
            raise InvalidResponse("a transfer encoding other than chunked")
        return bool(lengths or encodings)


def _too_large() -> InvalidResponse:
    return InvalidResponse(f"headers of more than {MAX_HEAD_BYTES >> 10} KiB, or more than {MAX_HEADERS}")
