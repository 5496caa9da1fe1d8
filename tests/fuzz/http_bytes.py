"""Raw bytes on a connection: no answer is a 5xx, and the server goes on serving.

When it says nothing more, which may be because the request is incomplete, the client closes its side.
"""

from __future__ import annotations

import random
import re

from tests.fuzz.http_requests import HTTPRequests
from tests.fuzz.http_server import Connection, check
from tests.fuzz.mutate import mutate_bytes
from tests.fuzz.target import Fault, Target
from tests.server.raw import request_bytes

CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2, "stream": True}
GET = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
CHUNKED = (
    b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\nTrailer: a\r\n\r\n"
    b'4;x=y\r\n{"pr\r\n9\r\nompt":"a"\r\n1\r\n}\r\n0\r\na: b\r\n\r\n'
)
STATUS = re.compile(rb"^HTTP/1\.1 (5\d\d) ", re.MULTILINE)


def make() -> Target:
    return HTTPBytes()


class HTTPBytes(HTTPRequests):
    seeds = [
        request_bytes("/v1/chat/completions", CHAT),
        GET + request_bytes("/v1/completions", {"prompt": "Hi", "max_tokens": 2}) + GET,
        CHUNKED + GET,
        b"POST /tokenize HTTP/1.0\r\nExpect: 100-continue\r\nContent-Length: 14\r\nConnection: keep-alive\r\n\r\n"
        b'{"prompt":"a"}',
        b"GET / HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n",
    ]
    words = (
        *(b"\r\n", b"\r\n\r\n", b"\n", b"\r", b" ", b"\x00", b"\xff", b": ", b"//", b"?", b"#", b"%00", b"0\r\n\r\n"),
        *(b"HTTP/1.1", b"HTTP/1.0", b"HTTP/2.0", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"http://localhost/health "),
        *(b"HEAD ", b"OPTIONS * ", b"CONNECT a:1 ", b"Content-Length: 5\r\n", b"Content-Length: -1\r\n"),
        *(b"Transfer-Encoding: chunked\r\n", b"FFFFFFFFFFFFFFFF\r\n", b"Connection: close\r\n", b"Host: \r\n"),
        *(b"Expect: 100-continue\r\n", b"Upgrade: h2c\r\n"),
    )

    def mutate(self, data: bytes, rng: random.Random) -> bytes:
        return mutate_bytes(data, rng, self.words, self.seeds)

    def read(self, data: bytes) -> None:
        connection = Connection(self._server)
        try:
            connection.send(data)
            said = connection.receive_all()
            if found := STATUS.search(said):
                raise Fault(f"{found[1].decode()}: {said[-300:]!r}")
            connection.send(GET)
            check(connection.receive("GET"), "GET /health afterwards")
        finally:
            connection.close()
        self.check_log()
