"""What an upstream server sends to the proxy: each client gets an answer, or the end of one, and the proxy serves on.

An input is all that the upstream sends for a request, after which it closes the connection.
"""

from __future__ import annotations

import http.client
import json
import socketserver
import threading

from octavo_fleet.proxy import upstream
from tests.fuzz.http_server import READ_SECONDS, Connection, LogErrors
from tests.fuzz.target import Fault, Target
from tests.server.proxy.proxied import Proxy
from tests.server.raw import request_bytes

USAGE = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
BODY = json.dumps({"id": "a", "object": "text_completion", "choices": [{"index": 0, "text": "Hi"}], "usage": USAGE})
MODELS = b'{"object":"list","data":[{"id":"test","object":"model"}]}'
PIECES = [f"data: {BODY}\n\n", "data: [DONE]\n\n"]
CHUNKS = "".join(f"{len(piece):x}\r\n{piece}\r\n" for piece in PIECES) + "0\r\n\r\n"


def answer(body: str | bytes, *more: str, status: str = "200 OK") -> bytes:
    content = body.encode() if isinstance(body, str) else body
    lines = [f"HTTP/1.1 {status}", "Content-Type: application/json", f"Content-Length: {len(content)}", *more, "", ""]
    return "\r\n".join(lines).encode() + content


class Handler(socketserver.StreamRequestHandler):
    """Answers POST with the input, and what the proxy asks by itself as a sound server would."""

    server: Server

    def handle(self) -> None:
        try:
            first = self.rfile.readline(1 << 16)
            length = 0
            while (line := self.rfile.readline(1 << 16)).strip():
                name, _, value = line.partition(b":")
                length = int(value) if name.lower() == b"content-length" else length
            self.rfile.read(length)
            self.wfile.write(self.server.sent if first.startswith(b"POST") else answer(MODELS, "Connection: close"))
        except (OSError, ValueError):
            pass


class Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    allow_reuse_address = True
    sent = b""


def make() -> Target:
    return ProxiedUpstream()


class ProxiedUpstream(Target):
    max_seconds = 15.0
    seeds = [
        answer(BODY),
        answer(BODY, "x-request-id: a", "Set-Cookie: a=b", "Connection: close"),
        answer('{"error": {"message": "no", "type": "x", "code": 1}}', status="429 Too Many Requests"),
        b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n" + CHUNKS.encode(),
        b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n" + "".join(PIECES).encode(),
        b"HTTP/1.1 100 Continue\r\n\r\n" + answer(BODY),
        b"HTTP/1.1 204 No Content\r\n\r\n",
    ]
    words = (
        *(b"\r\n", b"\r\n\r\n", b"\n", b"\x00", b"HTTP/1.1 999 \r\n", b"HTTP/1.0 200\r\n", b"FFFFFFFFFFFFFFFF\r\n"),
        *(b"Content-Length: 5\r\n", b"Content-Length: -1\r\n", b"Transfer-Encoding: chunked\r\n", b"data: ", b"\n\n"),
        *(b'"usage":{"prompt_tokens":-1000000}', b"Content-Encoding: gzip\r\n", b"Location: /\r\n", b" folded\r\n"),
    )

    def __init__(self) -> None:
        super().__init__()
        self._errors = LogErrors()
        self._pause, upstream.RETRY_PAUSE = upstream.RETRY_PAUSE, 0.0
        self._upstream = Server(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._upstream.serve_forever, args=(0.02,), daemon=True).start()
        self._proxy = Proxy(f"http://127.0.0.1:{self._upstream.server_address[1]}", {"access_log": False})

    def read(self, data: bytes) -> None:
        self._upstream.sent = data
        for is_streamed in (False, True):
            self._ask({"model": "test", "prompt": "Hi", "max_tokens": 2, "stream": is_streamed})
        self._upstream.sent = self.seeds[0]
        if (status := self._ask({"model": "test", "prompt": "Hi"})) not in (200, 503):  # 503: it counts as down
            raise Fault(f"{status} to a sound answer afterwards")
        if self._errors.found:
            found, self._errors.found = self._errors.found, []
            raise Fault(f"the proxy logged: {found[0]}")

    def _ask(self, body: dict[str, object]) -> int:
        """The status of the answer, 0 if the connection ended before it; its body may be a part of one."""
        connection = Connection(self._proxy)
        connection.send(request_bytes("/v1/completions", body))
        client = connection._socket
        assert client is not None
        response = http.client.HTTPResponse(client, method="POST")
        try:
            response.begin()
            response.read()
        except TimeoutError:
            raise Fault(f"no answer within {READ_SECONDS} s") from None
        except (http.client.HTTPException, OSError):
            pass
        finally:
            response.close()
            connection.close()
        return response.status if isinstance(response.status, int) else 0

    def close(self) -> None:
        self._proxy.stop()
        self._upstream.shutdown()
        self._upstream.server_close()
        self._errors.close()
        upstream.RETRY_PAUSE = self._pause
        super().close()
