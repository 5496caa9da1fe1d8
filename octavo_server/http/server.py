"""The HTTP server: uvicorn with custom connections, response writes and shutdown."""

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

from octavo.errors import ConfigError
from octavo.server_settings import ServerSettings
from octavo_server.http.connection_limits import BoundedProtocol, ByteBudget

BACKLOG = 4096
KEEP_ALIVE_SECONDS = 75
"""Longer than clients keep idle connections: if the server closed first, a request in transit would be lost."""
FLUSH_SECONDS = 2
"""Time to flush the last response bytes after the drain."""
MAX_CONNECTIONS = 8192
RESERVED_FILES = 64
"""File descriptors not available to connections, mainly for restarts of the engine process."""
MAX_UNFINISHED_HEADS = 8 << 20
"""Bytes of all incomplete request heads in total."""
TICKS_PER_SECOND = 10

WRITE_PIECE = "octavo.write_piece"
"""Key of the ASGI scope: a ``WritePiece`` for the body of this response."""

IS_GONE = "octavo.is_gone"
"""Key of the ASGI scope: a function that says whether the client has closed the connection."""

WritePiece = Callable[[bytes], bool]
"""Writes one piece of a chunked body, after the head. Returns false, with nothing written, when the client is slow or
gone; the caller then uses ASGI's ``send``, which waits."""


class ResponseTransport:
    """A response's view of the transport: the head is held back and sent with the first piece of the body.

    Sent separately they would be two packets, and the client would wake twice before its first token.
    """

    def __init__(self, transport: asyncio.Transport, flow: FlowControl, joins_head: bool) -> None:
        self._transport = transport
        self._flow = flow
        self._head: bytes | None = b"" if joins_head else None
        """Empty until the head is written, ``None`` once it was sent."""
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
        """See ``WritePiece``; writes one chunk (RFC 9112, section 7.1)."""
        if self._flow.write_paused or self._transport.is_closing():
            return False
        self.write(b"%x\r\n%b\r\n" % (len(data), data))
        return True


class PieceProtocol(BoundedProtocol):
    """Adds ``WRITE_PIECE`` to the scope: ASGI's ``send`` costs a coroutine, a message and checks for each piece."""

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        if self._is_in_head:  # an upgrade was offered; the head is parsed again
            return
        # Not joined when there is no body (HEAD), or when "100 Continue" precedes the head.
        joins_head = self.scope["method"] == "POST" and not self.expect_100_continue
        transport = ResponseTransport(self.transport, self.flow, joins_head)
        self.cycle.transport = transport  # type: ignore[assignment]
        self.scope[WRITE_PIECE] = transport.write_piece  # type: ignore[literal-required]
        self.scope[IS_GONE] = transport.is_closing  # type: ignore[literal-required]


class HTTPServer(uvicorn.Server):
    """uvicorn without its signal handlers, which would end streams before the drain."""

    def __init__(self, app: Starlette, settings: ServerSettings) -> None:
        """Raises ``ConfigError`` for certificates that cannot be read."""
        logging.getLogger("uvicorn").setLevel("WARNING")
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
            # uvicorn skips this on a forced exit; the lifespan task would then end with a traceback.
            await self.lifespan.shutdown()

    def stop_accepting(self) -> None:
        """Accept no more connections; the listening socket stays open in other processes."""
        for server in self.servers:
            server.close()

    def release_idle(self, take: Callable[[int], None]) -> None:
        """Close the connections without a request in progress, after ``take`` got the descriptor of their sockets.

        TLS connections have a state that cannot be taken: they are closed, or end with their response.
        """
        for connection in list(self.server_state.connections):
            assert isinstance(connection, BoundedProtocol)
            if self.config.is_ssl:
                connection.shutdown()
            elif connection.is_between_requests:
                with contextlib.suppress(OSError):  # too many descriptors are open: later
                    take(connection.transport.get_extra_info("socket").fileno())
                    connection.transport.abort()

    def adopt(self, connection: socket.socket) -> None:
        """Serve a connection that another process has accepted."""
        task = asyncio.create_task(self._adopt(connection))
        self.server_state.tasks.add(task)
        task.add_done_callback(self.server_state.tasks.discard)

    async def _adopt(self, connection: socket.socket) -> None:
        def protocol() -> asyncio.Protocol:
            return self.config.http_protocol_class(  # type: ignore[call-arg]
                config=self.config, server_state=self.server_state, app_state=self.lifespan.state
            )

        connection.setblocking(False)
        with contextlib.suppress(OSError):  # the client closed it
            await asyncio.get_running_loop().connect_accepted_socket(protocol, connection)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _max_connections() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    return min(MAX_CONNECTIONS, max(soft - RESERVED_FILES, soft // 2))
