"""The HTTP server under the application: uvicorn, as this server needs it."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import resource
import socket
import ssl
from collections.abc import Callable, Iterator

import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.flow_control import FlowControl

from octavo.config import ServerSettings
from octavo.errors import ConfigError
from octavo.server.byte_budget import ByteBudget
from octavo.server.connection import BoundedProtocol

BACKLOG = 4096
KEEP_ALIVE_SECONDS = 75
"""Longer than clients keep idle connections, so that it is they who close them and no request is lost."""
FLUSH_SECONDS = 2
"""Time for the last bytes of answers to leave after the drain."""
MAX_CONNECTIONS = 8192
RESERVED_FILES = 64
"""Open files that connections leave to everything else, the restart of the engine process above all."""
MAX_UNFINISHED_HEADS = 8 << 20
"""Bytes of all of them together."""
TICKS_PER_SECOND = 10

WRITE_PIECE = "octavo.write_piece"
"""Key of the ASGI scope: a ``WritePiece`` for the body of this response."""

WritePiece = Callable[[bytes], bool]
"""Writes more of a body without a length, once the head was sent. Returns false, with nothing written, when the client
is slow or gone: ASGI's ``send`` knows how to wait."""


class ResponseTransport:
    """A connection as one response writes to it: the head waits for the first piece of the body and leaves with it.

    Apart they would be two packets, for which a client wakes twice before it has its first token.
    """

    def __init__(self, transport: asyncio.Transport, flow: FlowControl, joins_head: bool) -> None:
        self._transport = transport
        self._flow = flow
        self._head: bytes | None = b"" if joins_head else None
        """Empty until there is one, ``None`` when it is sent."""
        self.close = transport.close
        self.is_closing = transport.is_closing

    def write(self, data: bytes) -> None:
        if self._head is None:
            self._transport.write(data)
        elif self._head:
            head, self._head = self._head, None
            self._transport.writelines([head, data])
        else:
            self._head = data

    def write_piece(self, data: bytes) -> bool:
        """See ``WritePiece``; pieces are chunks of RFC 9112, section 7.1."""
        if self._flow.write_paused or self._transport.is_closing():
            return False
        self.write(b"%x\r\n%b\r\n" % (len(data), data))
        return True


class PieceProtocol(BoundedProtocol):
    """Bodies in many small pieces: ``send`` costs a coroutine, a message and its checks for each."""

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        if self._is_in_head:  # the head will come once more
            return
        # What follows a head is nothing after HEAD, and what comes before it may be "100 Continue".
        joins_head = self.scope["method"] == "POST" and not self.expect_100_continue
        transport = ResponseTransport(self.transport, self.flow, joins_head)
        self.cycle.transport = transport  # type: ignore[assignment]
        self.scope[WRITE_PIECE] = transport.write_piece  # type: ignore[literal-required]


class HTTPServer(uvicorn.Server):
    """uvicorn without its own signal handlers, which would end streams before they are drained."""

    def __init__(self, app: Starlette, settings: ServerSettings) -> None:
        logging.getLogger("uvicorn").setLevel("WARNING")
        """Raises ``ConfigError`` for certificates that cannot be read."""
        config = uvicorn.Config(
            app,
            http=functools.partial(  # type: ignore[arg-type]
                PieceProtocol, heads=ByteBudget(MAX_UNFINISHED_HEADS), max_connections=_max_connections()
            ),
            ws="none",
            proxy_headers=False,
            lifespan="on",
            log_config=None,
            access_log=False,
            server_header=False,
            backlog=BACKLOG,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=FLUSH_SECONDS,
            ssl_certfile=settings.ssl_certfile,
            ssl_keyfile=settings.ssl_keyfile,
            ssl_ca_certs=settings.ssl_ca_certs,
            ssl_cert_reqs=ssl.CERT_REQUIRED if settings.ssl_ca_certs else ssl.CERT_NONE,
        )
        try:
            config.load()
        except OSError as error:
            raise ConfigError(f"ssl_certfile, ssl_keyfile or ssl_ca_certs cannot be read: {error}") from None
        super().__init__(config)

    async def on_tick(self, counter: int) -> bool:
        if counter % TICKS_PER_SECOND == 0:
            now = asyncio.get_running_loop().time()
            for connection in list(self.server_state.connections):
                connection.close_if_late(now)  # type: ignore[union-attr]
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown(sockets)
        if self.force_exit:
            # uvicorn leaves it out then, and its task would end with a traceback when the event loop does.
            await self.lifespan.shutdown()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _max_connections() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    return min(MAX_CONNECTIONS, max(soft - RESERVED_FILES, soft // 2))
