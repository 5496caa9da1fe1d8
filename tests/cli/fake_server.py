"""A server of the OpenAI API with scripted answers, on 127.0.0.1."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class FakeServer:
    """``answers`` are used up in order; each is a list of raw parts of an event stream, or a status with a body.

    A status with a body may have headers behind it.
    """

    def __init__(self) -> None:
        self.answers: list[list[bytes] | tuple[int, bytes] | tuple[int, bytes, dict[str, str]]] = []
        self.models: bytes = json.dumps({"data": [{"id": "first"}, {"id": "second"}]}).encode()
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.url = ""


def event(**delta: Any) -> bytes:
    """One chunk of a chat completion as server-sent event."""
    return b"data: " + json.dumps({"choices": [{"index": 0, "delta": delta}]}, ensure_ascii=False).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"


@contextmanager
def running() -> Iterator[FakeServer]:
    """Serve until the end of the block."""
    fake = FakeServer()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            fake.headers.append(dict(self.headers))
            self.reply(200 if self.path == "/v1/models" else 404, fake.models)

        def do_POST(self) -> None:
            assert self.path == "/v1/chat/completions"
            fake.headers.append(dict(self.headers))
            fake.bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            answer = fake.answers.pop(0)
            if isinstance(answer, tuple):
                self.reply(*answer)
                return
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.end_headers()
            for part in answer:
                self.wfile.write(part)
                self.wfile.flush()

        def reply(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
            self.send_response(status)
            for name, value in (headers or {}).items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        fake.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield fake
        finally:
            server.shutdown()
            thread.join()
