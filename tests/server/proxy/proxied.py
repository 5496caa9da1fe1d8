"""A proxy in a thread of the test process."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from typing import Any

from octavo.config import ServeConfig
from octavo_fleet.proxy.app import create_proxy_app
from octavo_fleet.proxy.upstream import Upstream
from tests.server.conftest import AppServer, Served

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


class Raw:
    """An upstream that sends given bytes to one POST after another, then closes the connection."""

    def __init__(self, *answers: bytes, port: int = 0) -> None:
        self.answers = list(answers)
        self.requests: list[bytes] = []
        self._socket = socket.create_server(("127.0.0.1", port), reuse_port=False)
        self.port = self._socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._connections: list[socket.socket] = []
        self._is_closed = False
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._socket.accept()
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, True)
                self._connections.append(connection)
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            data = b""
            while (piece := connection.recv(1 << 16)) and not self._is_closed:
                data += piece
                head, found, body = data.partition(b"\r\n\r\n")
                length = next((int(line[16:]) for line in head.split(b"\r\n") if line[:16] == b"content-length: "), 0)
                if not found or len(body) < length:
                    continue
                data = b""
                if head.startswith(b"POST"):
                    self.requests.append(head + b"\r\n\r\n" + body)
                    connection.sendall(self.answers.pop(0) if self.answers else OK)
                    return
                connection.sendall(OK)

    def close(self) -> None:
        self._is_closed = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


class Proxy(AppServer):
    """A running proxy to the server at ``url``."""

    def __init__(self, url: str, settings: dict[str, Any] | None = None) -> None:
        config = ServeConfig.from_flat({"backend": "openai", "upstream": url, **(settings or {})})
        self.upstream = Upstream(config)
        super().__init__(create_proxy_app(config, self.upstream), config.server)
        self.run(self.upstream.start())

    def run(self, awaitable: Any) -> Any:
        """Run a coroutine on the proxy's event loop."""
        return asyncio.run_coroutine_threadsafe(awaitable, self.loop).result(30)

    def wait_ready(self, is_ready: bool = True, number: int | None = None) -> None:
        """Wait until the upstream, or one of its servers, counts as up, or as down."""
        for _ in range(1000):
            if (self.upstream.is_ready if number is None else self.upstream._servers[number].is_up) == is_ready:
                return
            threading.Event().wait(0.01)
        raise TimeoutError

    def wait_idle(self) -> None:
        """Wait until earlier requests have ended: a client may have all of an answer before that."""
        for _ in range(1000):
            if not self.upstream.num_live:
                return
            threading.Event().wait(0.01)
        raise TimeoutError

    def stop(self) -> None:
        self.run(self.upstream.stop(0))
        super().stop()


class ProxiedServed(Proxy):
    """A ``Served`` whose clients go through a proxy; ``app`` and ``engine`` are those behind it."""

    def __init__(self, inner: Served) -> None:
        super().__init__(inner.url)
        self.inner, self.engine, self.app = inner, inner.engine, inner.app

    def call(self, function: Any) -> Any:
        return self.inner.call(function)

    def stop(self) -> None:
        self.run(self.upstream.stop(0))
        self.client.close()
        self.loop.call_soon_threadsafe(self._server.end)
        self._thread.join(30)
        self.inner.stop()
