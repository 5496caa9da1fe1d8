"""What arrives on a connection: bounds while it arrives, answers to what is no HTTP, and offers to upgrade."""

from __future__ import annotations

import gc
import json
import re
import socket
import time
from collections.abc import Callable
from typing import Any

import pytest

from octavo_server.http import connection_limits as bounds
from octavo_server.http.server import MAX_UNFINISHED_HEADS
from tests.server.conftest import Served
from tests.server.in_process import InProcessEngine
from tests.server.raw import request_bytes
from tests.tiers import one_in

MiB = 1 << 20
GET = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
CHUNKED = b"POST /health HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
COMPLETION = request_bytes("/v1/completions", {"prompt": "Hi", "max_tokens": 4})


def connect(served: Served) -> socket.socket:
    return socket.create_connection(("127.0.0.1", served.port), timeout=30)


def rest(client: socket.socket) -> bytes:
    """All that comes until the server closes the connection."""
    data = b""
    try:
        while piece := client.recv(65536):
            data += piece
    except ConnectionResetError:
        pass
    return data


def flood(client: socket.socket, piece: bytes, num_bytes: int) -> int:
    """Send ``piece`` again and again; how many bytes could be sent before the server closed the connection."""
    sent = 0
    try:
        while sent < num_bytes:
            client.sendall(piece)
            sent += len(piece)
    except OSError:
        pass
    return sent


def assert_refused(answer: bytes, status: int, code: str) -> None:
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status), answer
    assert re.search(rb"^x-request-id: [0-9a-f]{32}\r?$", head, re.MULTILINE)
    assert b"\r\nconnection: close" in head
    assert b"\r\ncontent-type: application/json" in head
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == code


ENDLESS = {
    "headers": (GET, b"a:\r\n" * 4096),
    "a header": (GET + b"a: ", b"a" * 16384),
    "a header's name": (GET, b"a" * 16384),
    "a path": (b"GET /", b"a" * 16384),
    "a query": (b"GET /?", b"a" * 16384),
    "empty lines": (b"", b"\r\n" * 8192),
    "trailers": (CHUNKED + b"0\r\n", b"a:\r\n" * 4096),
    "a trailer": (CHUNKED + b"0\r\na: ", b"a" * 16384),
    "a chunk's extension": (CHUNKED + b"1;", b"a" * 16384),
    "requests": (b"", GET + b"\r\n"),
}


@pytest.mark.parametrize("name", ENDLESS)
def test_what_has_no_end_is_cut(served: Served, name: str) -> None:
    """The buffers of the two sockets hold a few MiB."""
    start, piece = ENDLESS[name]
    with connect(served) as client:
        client.sendall(start)
        if name == "requests":
            # All of them are answered, and each answer read would let the next request in. The server only waits.
            piece *= 500
            client.settimeout(1)
        assert flood(client, piece, 64 * MiB) < 32 * MiB
    assert served.client.get("/health").status_code == 200


@pytest.mark.parametrize("headers", [b"x: " + b"x" * 33_000, b"\r\n".join(b"x-%d: 1" % i for i in range(101))])
def test_headers_too_large_are_answered(served: Served, headers: bytes) -> None:
    with connect(served) as client:
        client.sendall(GET + headers + b"\r\n\r\n")
        assert_refused(rest(client), 431, "headers_too_large")


def test_headers_at_the_bound_are_served(served: Served) -> None:
    headers = b"\r\n".join(b"x-%02d: %b" % (i, b"x" * 300) for i in range(99))
    with connect(served) as client:
        client.sendall(GET + headers + b"\r\n\r\n")
        assert client.recv(4096).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"NONSENSE\r\n\r\n",
        b"GET / HTTP/1.1\r\nContent-Length: x\r\n\r\n",
        b"GET / HTTP/1.1\r\nno colon\r\n\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
        CHUNKED + b"xyz\r\n",
        b"CONNECT localhost:443 HTTP/1.1\r\nHost: localhost:443\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    ],
)
def test_what_is_no_http_gets_an_error_like_any_other(served: Served, data: bytes) -> None:
    with connect(served) as client:
        client.sendall(data)
        answer = rest(client)
    if data.startswith(CHUNKED):
        # The application may have answered before the body was found to be wrong.
        assert answer.startswith((b"HTTP/1.1 400 ", b"HTTP/1.1 405 "))
        assert b"x-request-id" in answer
    else:
        assert_refused(answer, 400, "malformed_request")


@pytest.mark.parametrize("num_before", [1, 3])
def test_what_is_no_http_is_refused_after_the_responses_in_progress(served: Served, num_before: int) -> None:
    """A client may have read all of a response before the application has ended it."""
    stream = request_bytes("/v1/completions", {"prompt": "Hi", "max_tokens": 200, "stream": True})
    with connect(served) as client:
        client.sendall(stream * num_before + b"None / HTTP/1.1\r\n\r\n" + b"x" * 1000)
        *answers, refusal = re.split(rb"(?=HTTP/1.1 )", rest(client))[1:]
    assert len(answers) == num_before
    assert all(b"[DONE]" in answer for answer in answers)
    assert_refused(refusal, 400, "malformed_request")


def test_trailers_are_no_headers(served: Served) -> None:
    with connect(served) as client:
        start = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        body = b'{"prompt":"Hi","max_tokens":4}'
        chunk = b"%x\r\n%b\r\n0\r\n" % (len(body), body)
        client.sendall(start + b"Transfer-Encoding: chunked\r\n\r\n" + chunk + b"x-request-id: from-a-trailer\r\n\r\n")
        answer = client.recv(4096)
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert b"from-a-trailer" not in answer


@pytest.mark.parametrize("started", [b"", GET, GET + b"x: y", b"\r\n", b"G"])
def test_an_unfinished_head_times_out(serve_app: Any, monkeypatch: pytest.MonkeyPatch, started: bytes) -> None:
    monkeypatch.setattr(bounds, "HEAD_SECONDS", 0.2)
    with connect(serve_app()) as client:
        client.sendall(started)
        answer = rest(client)
    if started.strip():
        assert_refused(answer, 408, "request_timeout")
    else:
        assert answer == b""


def test_an_endless_head_that_trickles_times_out(serve_app: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each byte must not begin the time anew."""
    monkeypatch.setattr(bounds, "HEAD_SECONDS", 0.5)
    with connect(serve_app()) as client:
        client.sendall(GET)
        begun = time.monotonic()
        try:
            while time.monotonic() - begun < 8:
                client.sendall(b"a")
                time.sleep(0.05)
        except OSError:
            pass
        assert time.monotonic() - begun < 6


def test_an_unread_body_is_cut(served: Served) -> None:
    """``/health`` answers at once, whatever follows."""
    with connect(served) as client:
        client.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nContent-Length: 999999999\r\n\r\n")
        assert client.recv(4096).startswith(b"HTTP/1.1 200 ")
        assert flood(client, b"x" * 65536, 64 * MiB) < 32 * MiB


def test_unfinished_heads_together(serve_app: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest go, and a small one is served."""
    served = serve_app()
    many = MAX_UNFINISHED_HEADS // 30_000 + 20
    clients = [connect(served) for _ in range(many)]
    small = connect(served)
    small.sendall(GET)
    for client in clients:
        client.sendall(GET + b"x: " + b"y" * 30_000)
    gone = 0
    deadline = time.monotonic() + 30
    while gone < 10 and time.monotonic() < deadline:
        gone = sum(_is_closed(client) for client in clients)
    assert 10 <= gone < 60
    small.sendall(b"\r\n")
    assert small.recv(4096).startswith(b"HTTP/1.1 200 ")
    for client in (*clients, small):
        client.close()


def _is_closed(client: socket.socket) -> bool:
    client.setblocking(False)
    try:
        return client.recv(1, socket.MSG_PEEK) in (b"", b"H")
    except BlockingIOError:
        return False
    except OSError:
        return True


def test_too_many_connections(serve_app: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Idle ones make place; when all are busy, one more is told so."""
    monkeypatch.setattr("octavo_server.http.server.MAX_CONNECTIONS", 4)
    served = serve_app()
    idle = [connect(served) for _ in range(6)]
    assert served.client.get("/health").status_code == 200
    for client in idle:
        client.close()
    served.call(lambda: setattr(served.engine, "runs", False))
    busy = []
    for _ in range(4):
        busy.append(connect(served))
        busy[-1].sendall(COMPLETION)
    while len(served.engine.live) < 4:
        time.sleep(0.01)
    with connect(served) as client:
        assert_refused(rest(client), 503, "engine_unavailable")
    for client in busy:
        client.close()


# --- pipelining ---


def answers(client: socket.socket, number: int) -> list[bytes]:
    """So many answers, by their request ids."""
    data = b""
    while data.count(b"x-request-id: ") < number or not data.endswith(b"}"):
        piece = client.recv(1 << 16)
        assert piece, f"closed after {data.count(b'x-request-id: ')}"
        data += piece
    assert data.count(b"HTTP/1.1 200 ") == number
    return re.findall(rb"x-request-id: (\S+)", data)


@one_in(3)
@pytest.mark.slow
@pytest.mark.parametrize("number", [17, 18, 20, 200, 3000])
@pytest.mark.parametrize("size", [1 << 20, 1000])
def test_pipelined_requests_are_all_answered(served: Served, number: int, size: int) -> None:
    """In their order, whatever arrives at once, with bodies and without; and the connection goes on."""
    kinds = (GET, GET.replace(b"GET", b"HEAD"), COMPLETION if number <= 20 else GET)
    named = [
        kind.replace(b"\r\n", b"\r\nx-request-id: n%d\r\n" % i, 1) + (b"" if kind is COMPLETION else b"\r\n")
        for i in range(number)
        for kind in (kinds[i % 3] if i < number - 1 else GET,)
    ]
    data = b"".join(named)
    with connect(served) as client:
        for start in range(0, len(data), size):
            client.sendall(data[start : start + size])
        assert answers(client, number) == [b"n%d" % i for i in range(number)]
        client.sendall(GET + b"\r\n")
        assert client.recv(4096).startswith(b"HTTP/1.1 200 ")


def test_few_pipelined_requests_are_parsed_ahead(serve_app: Callable[..., Served]) -> None:
    """The others stay as they arrived, at most one packet of them, and then the client waits."""
    engine = InProcessEngine(runs=False)
    served = serve_app(engine)
    with connect(served) as client:
        client.settimeout(0.5)
        client.sendall(COMPLETION)
        assert flood(client, (GET + b"\r\n") * 1000, 64 * MiB) < 32 * MiB
        (connection,) = served._server.server_state.connections
        smallest = len(b"GET / HTTP/1.1\r\n\r\n")
        assert len(connection.pipeline) <= bounds.MAX_PIPELINED + bounds.PARSED_BYTES // smallest
        assert len(connection._unparsed) <= MiB
        served.call(lambda: setattr(engine, "runs", True))
        served.call(engine._schedule)
        client.settimeout(30)
        data = b""
        while data.count(b"HTTP/1.1 200 ") < 2000:
            data += client.recv(1 << 16)


def test_a_fault_after_many_pipelined_requests(served: Served) -> None:
    """What came before it is answered."""
    with connect(served) as client:
        client.sendall((GET + b"\r\n") * 40 + b"NONSENSE\r\n\r\n")
        assert rest(client).count(b"HTTP/1.1 200 ") >= 23


# --- offers to upgrade ---

OFFERS = {
    "h2c": b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n",
    "h2c, kept alive": b"Connection: keep-alive, Upgrade\r\nUpgrade: h2c\r\n",
    "websocket": b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n",
}


@pytest.mark.parametrize("split", [0, 10, "head", "body", None])
@pytest.mark.parametrize("offer", OFFERS)
def test_an_offer_to_upgrade_is_passed_over(
    served: Served, offer: str, split: int | str | None, caplog: pytest.LogCaptureFixture
) -> None:
    request = COMPLETION.replace(b"\r\n", b"\r\n" + OFFERS[offer], 1)
    place = {"head": request.index(b"\r\n\r\n") + 4, "body": len(request) - 5, None: len(request)}.get(split, split)
    with connect(served) as client:
        for _ in range(2):  # and the connection goes on
            client.sendall(request[:place])
            if place != len(request):
                time.sleep(0.02)
                client.sendall(request[place:])
            answer = client.recv(65536)
            assert answer.startswith(b"HTTP/1.1 200 "), answer
            assert b'"text_completion"' in answer
    assert caplog.records == []


def test_an_offer_with_chunks_and_without_a_body(served: Served) -> None:
    offer = OFFERS["h2c"]
    with connect(served) as client:
        client.sendall(GET + offer + b"\r\n" + GET + offer + b"\r\n")
        data = b""
        while data.count(b"HTTP/1.1 200 ") < 2:
            piece = client.recv(65536)
            assert piece, data
            data += piece
        start = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        client.sendall(start + offer + b"Transfer-Encoding: chunked\r\n\r\n1e\r\n")
        client.sendall(b'{"prompt":"Hi","max_tokens":4}\r\n0\r\n\r\n')
        assert client.recv(65536).startswith(b"HTTP/1.1 200 ")


def test_an_offer_that_closes(served: Served) -> None:
    with connect(served) as client:
        client.sendall(GET + b"Connection: close, Upgrade\r\nUpgrade: h2c\r\n\r\n")
        assert rest(client).startswith(b"HTTP/1.1 200 ")


def test_a_client_that_leaves_between_pipelined_requests(
    serve_app: Callable[..., Served], caplog: pytest.LogCaptureFixture
) -> None:
    """The request that is computed ends, the other one never begins, and neither is an error of the server."""
    engine = InProcessEngine(runs=False)
    served = serve_app(engine)
    with connect(served) as client:
        client.sendall(COMPLETION + COMPLETION)
        while not engine.live:
            time.sleep(0.005)
    deadline = time.monotonic() + 30
    while engine.live and time.monotonic() < deadline:
        time.sleep(0.005)
    assert len(engine.aborted) == len(engine.requests) == 1
    assert not caplog.records


def test_ended_connections_leave_nothing_for_the_garbage_collector(serve_app: Callable[..., Served]) -> None:
    """Each search for garbage stops all streams: those of one key's flood took 0.1 s, several times a second."""
    engine = InProcessEngine()
    served = serve_app(engine, api_key="key")

    def exchange(data: bytes, leaves: bool = False) -> None:
        with connect(served) as client:
            client.sendall(data.replace(b"Host: ", b"Connection: close\r\nAuthorization: Bearer key\r\nHost: "))
            if not leaves:
                assert rest(client)

    def exchange_all() -> None:
        engine.runs = True
        exchange(COMPLETION)
        exchange(request_bytes("/v1/completions", {"prompt": "Hi", "max_tokens": 4, "stream": True}))
        exchange(request_bytes("/v1/completions", {"prompt": "Hi", "max_tokens": -1}))
        exchange(request_bytes("/unknown", {}))
        exchange(b"no HTTP")
        engine.runs = False
        for is_streamed in (False, True):
            body = {"prompt": "Hi", "max_tokens": 100, "stream": is_streamed}
            exchange(request_bytes("/v1/completions", body), leaves=True)
        deadline, state = time.monotonic() + 30, served._server.server_state
        while (state.connections or engine.live or state.tasks) and time.monotonic() < deadline:
            time.sleep(0.005)
        assert not [*state.connections, *engine.live, *state.tasks]

    exchange_all()
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        exchange_all()
        gc.collect()
        names = {f"{type(found).__module__}.{type(found).__qualname__}" for found in gc.garbage}
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    assert not [name for name in names if name.startswith(("octavo", "uvicorn", "starlette", "uvloop"))]
