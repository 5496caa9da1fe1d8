"""An upstream that is a stranger: endless, silent, lying, or speaking unasked; and paths that would control it."""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from octavo_fleet.proxy import connections, relay, upstream
from octavo_server.tenants.api_keys import Account
from tests.server.proxy.proxied import HEAD, OK, Proxy, Raw, chunk
from tests.timing import undisturbed

MiB = 1 << 20
PROMPT: dict[str, Any] = {"prompt": "Hi", "max_tokens": 4}
PLAIN = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
START = b"HTTP/1.1 200 OK\r\n"
SOME_SECONDS = (0.3, 3.0, 30.0)
"""Until a request ends; on a busy machine what an upstream sends at once comes after the first, or the second."""


class Stranger(Raw):
    """An upstream that answers each POST with pieces that a function makes, and stays connected."""

    def __init__(self, answer: Callable[[], Iterator[bytes]]) -> None:
        super().__init__()
        self.num_sent = 0
        self._answer = answer

    def _serve(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            while head := connection.recv(1 << 16):
                if not head.startswith(b"POST"):
                    connection.sendall(OK)
                    continue
                for piece in self._answer():
                    connection.sendall(piece)
                    self.num_sent += len(piece)


def ask(proxy: Proxy, path: str = "/v1/completions") -> tuple[int, str]:
    """Status and error code of an answer."""
    response = proxy.client.post(path, json=PROMPT)
    return response.status_code, response.json()["error"]["code"]


def raw_request(proxy: Proxy, target: bytes) -> bytes:
    """The first line of the answer to a request for a target that clients would tidy."""
    with socket.create_connection(("127.0.0.1", proxy.port), timeout=30) as client:
        client.sendall(b"POST %b HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 2\r\n\r\n{}" % target)
        return client.recv(200).partition(b"\r\n")[0]


# --- what has no end ---

ENDLESS = {
    "headers": lambda: (START, b"a:\r\n" * 16384),
    "a header": lambda: (START + b"a: ", b"x" * 65536),
    "interim responses": lambda: (b"", b"HTTP/1.1 100 C\r\n\r\n" * 4096),
    "a status line": lambda: (b"HTTP/1.1 200 ", b"x" * 65536),
    "a chunk's extension": lambda: (START + b"transfer-encoding: chunked\r\n\r\n1;", b"x" * 65536),
    "trailers": lambda: (START + b"transfer-encoding: chunked\r\n\r\n0\r\n", b"a:\r\n" * 16384),
}


@pytest.mark.parametrize("name", ENDLESS)
def test_an_endless_head_is_a_502(start: Callable[..., Proxy], name: str) -> None:
    first, piece = ENDLESS[name]()

    def answer() -> Iterator[bytes]:
        yield first
        for _ in range(64 * MiB // len(piece)):
            yield piece

    stranger = Stranger(answer)
    proxy = start(stranger)
    assert ask(proxy) == (502, "upstream_failed")
    assert stranger.num_sent < 32 * MiB, "the buffers of two sockets"
    assert proxy.client.get("/health").status_code == 200


@pytest.mark.parametrize("is_stream", [False, True])
def test_an_upstream_waits_for_a_slow_client(start: Callable[..., Proxy], is_stream: bool) -> None:
    piece = chunk(b'data: {"a": "%b"}\n\n' % (b"x" * 65000))

    def answer() -> Iterator[bytes]:
        yield HEAD if is_stream else PLAIN + b"transfer-encoding: chunked\r\n\r\n"
        for _ in range(256 * MiB // len(piece)):
            yield piece

    stranger = Stranger(answer)
    proxy = start(stranger)
    with socket.create_connection(("127.0.0.1", proxy.port)) as client:
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 2\r\n\r\n{}")
        before = 0
        while not before or stranger.num_sent != before:
            before = stranger.num_sent
            time.sleep(0.2)
        assert 0 < before < 64 * MiB, "the buffers of four sockets, and little of the proxy's"
        assert proxy.upstream.num_live == 1
    proxy.wait_idle()  # the client has left


@pytest.mark.parametrize("has_length", [False, True])
def test_a_large_body_comes_whole_and_its_usage_is_counted(start: Callable[..., Proxy], has_length: bool) -> None:
    body = b'{"data": ["%b"], "usage": {"prompt_tokens": 70, "completion_tokens": 7}}' % (b"x" * (5 * MiB))

    def answer() -> Iterator[bytes]:
        length = b"content-length: %d" % len(body) if has_length else b"transfer-encoding: chunked"
        yield PLAIN + length + b"\r\n\r\n"
        for begin in range(0, len(body), 50_000):
            yield body[begin : begin + 50_000] if has_length else chunk(body[begin : begin + 50_000])
        yield b"" if has_length else b"0\r\n\r\n"

    proxy = start(Stranger(answer))
    charged = watch_charges(proxy)
    response = proxy.client.post("/v1/embeddings", json={})
    assert (response.status_code, response.content) == (200, body)
    assert charged() == 77


def test_the_body_of_a_head_is_not_fetched(start: Callable[..., Proxy]) -> None:
    class Large(Stranger):
        def _serve(self, connection: socket.socket) -> None:
            with connection, contextlib.suppress(OSError):
                while connection.recv(1 << 16).startswith(b"GET /health"):
                    connection.sendall(OK)
                connection.sendall(PLAIN + b"content-length: %d\r\n\r\n" % (256 * MiB))
                for _ in range(256):
                    connection.sendall(b"x" * MiB)
                    self.num_sent += MiB

    stranger = Large(lambda: iter([]))
    response = start(stranger).client.head("/v1/models")
    assert (response.status_code, response.content) == (200, b"")
    assert response.headers["content-length"] == str(256 * MiB)
    assert stranger.num_sent < 64 * MiB


def test_a_large_body_that_is_cut_is_cut_for_the_client(start: Callable[..., Proxy]) -> None:
    proxy = start(Raw(PLAIN + b"content-length: 9999999\r\n\r\n" + b"x" * 1_000_000))
    with socket.create_connection(("127.0.0.1", proxy.port), timeout=30) as client:
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 2\r\n\r\n{}")
        data = b""
        while piece := client.recv(1 << 16):
            data += piece
    head, _, body = data.partition(b"\r\n\r\n")
    assert b"content-length: 9999999" in head
    assert 0 < len(body) <= 1_000_000


def test_an_endless_event(start: Callable[..., Proxy], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "MAX_EVENT_BYTES", MiB)
    events = [b"data: " + b"x" * 600_000 + b"\n\n", b"data: " + b"y" * 1_200_000]
    proxy = start(Raw(HEAD + chunk(events[0]) + chunk(events[1]) + b"0\r\n\r\n"))
    response = proxy.client.post("/v1/completions", json={**PROMPT, "stream": True})
    assert response.content.startswith(events[0])
    assert b"upstream_failed" in response.content
    assert response.content.endswith(b"data: [DONE]\n\n")


def test_an_endless_answer_to_a_health_check(start: Callable[..., Proxy], monkeypatch: pytest.MonkeyPatch) -> None:
    class Endless(Stranger):
        def _serve(self, connection: socket.socket) -> None:
            with connection, contextlib.suppress(OSError):
                connection.recv(1 << 16)
                connection.sendall(START + b"\r\n")
                while True:
                    connection.sendall(b"x" * 65536)

    assert not start(Endless(lambda: iter([]))).upstream.is_ready


# --- what is no valid response ---


@pytest.mark.parametrize(
    "response",
    [
        b"HTTP/1.1 999 X\r\ncontent-length: 2\r\n\r\n{}",
        b"HTTP/1.1 101 X\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n",
        START + b"content-length: 2\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
        START + b"content-length: -2\r\n\r\n{}",
        START + b"x: a\r\n b\r\ncontent-length: 2\r\n\r\n{}",
        START + b"transfer-encoding: chunked\r\n\r\nzz\r\n",
    ],
)
def test_an_invalid_response_is_a_502(start: Callable[..., Proxy], response: bytes) -> None:
    raw = Raw(response)
    assert ask(start(raw)) == (502, "upstream_failed")
    assert len(raw.requests) == 1, "and is not asked again"


def test_headers_that_speak_for_this_servers_address_are_dropped(start: Callable[..., Proxy]) -> None:
    headers = (
        b"access-control-allow-origin: *\r\nset-cookie: a=b\r\nlocation: http://other/\r\n"
        b"connection: x-hop, close\r\nx-hop: 1\r\nx-kept: 1\r\ncontent-length: 2\r\n\r\n{}"
    )
    raw = Raw(b"HTTP/1.1 307 T\r\n" + headers)
    response = start(raw).client.post(
        "/v1/completions", json=PROMPT, headers={"connection": "keep-alive, x-mine", "x-mine": "1", "x-other": "1"}
    )
    assert response.status_code == 307
    assert "x-kept" in response.headers
    assert not {"access-control-allow-origin", "set-cookie", "location", "x-hop"} & set(response.headers)
    assert b"x-other" in raw.requests[0]
    assert b"x-mine" not in raw.requests[0]


@pytest.mark.parametrize("unasked", [START + b"content-length: 300\r\n\r\n", OK, b"\r\n", b"x"])
@pytest.mark.parametrize("is_joined", [False, True])
def test_what_an_upstream_says_unasked_reaches_no_request(
    start: Callable[..., Proxy], unasked: bytes, is_joined: bool
) -> None:
    numbers = iter(range(1, 100))
    may_speak, has_spoken = threading.Event(), threading.Event()

    def answer() -> Iterator[bytes]:
        own = START + b"content-length: 2\r\n\r\n%02d" % next(numbers)
        if is_joined:
            yield own + unasked
        else:
            yield own
            may_speak.wait(30)
            yield unasked
        has_spoken.set()

    proxy = start(Stranger(answer))
    for number in range(1, 6):
        assert proxy.client.post("/v1/completions", json=PROMPT).content == b"%02d" % number
        may_speak.set()
        assert has_spoken.wait(30)
        may_speak.clear()
        has_spoken.clear()


# --- silence ---


def test_an_upstream_that_never_answers(start: Callable[..., Proxy], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections.Connections.__init__, "__defaults__", (0.3,))
    stranger = Stranger(lambda: iter([]))
    assert ask(start(stranger)) == (504, "upstream_timeout")


@pytest.mark.parametrize("trickle", [b"HTTP/1.1 100 C\r\n\r\n", b"x"])
def test_a_head_that_trickles(start: Callable[..., Proxy], monkeypatch: pytest.MonkeyPatch, trickle: bytes) -> None:
    """A byte now and then does not begin the time anew."""
    monkeypatch.setattr(connections.Connections.__init__, "__defaults__", (0.4,))

    def answer() -> Iterator[bytes]:
        yield START + b"x: " if trickle == b"x" else b""
        for _ in range(8):
            time.sleep(0.15)
            yield trickle

    assert ask(start(Stranger(answer))) == (504, "upstream_timeout")


@pytest.mark.parametrize("is_stream", [False, True])
def test_an_upstream_that_stops_in_its_answer(
    start: Callable[..., Proxy], monkeypatch: pytest.MonkeyPatch, is_stream: bool
) -> None:
    begin = HEAD + chunk(b'data: {"a": 1}\n\n') if is_stream else PLAIN + b"content-length: 9\r\n\r\n{"
    for seconds in SOME_SECONDS:
        monkeypatch.setattr(connections.Connections.__init__, "__defaults__", (seconds,))
        proxy = start(Stranger(lambda: iter([begin])))
        if not is_stream:
            assert ask(proxy) == (504, "upstream_timeout")
            return
        response = proxy.client.post("/v1/completions", json={**PROMPT, "stream": True})
        if response.status_code == 200:
            break
    _, error, done, _ = response.content.split(b"\n\n")
    assert json.loads(error.removeprefix(b"data: "))["error"]["code"] == "upstream_timeout"
    assert done == b"data: [DONE]"


@pytest.mark.parametrize("begin", [b"", HEAD, HEAD + chunk(b'data: {"a": 1}\n\n')])
def test_the_request_timeout(start: Callable[..., Proxy], begin: bytes) -> None:
    code, has_event = b'"code":"deadline_exceeded"', begin.endswith(b"\n\n\r\n")
    for seconds in SOME_SECONDS:
        proxy = start(Stranger(lambda: iter([begin])), request_timeout=seconds)
        response = proxy.client.post("/v1/completions", json=PROMPT)
        if response.status_code == 200 or not has_event:
            break
    if has_event:
        assert response.status_code == 200
        assert code in response.content
        assert response.content.endswith(b"data: [DONE]\n\n")
    else:
        assert response.status_code == 504
        assert code in response.content
    proxy.wait_idle()


def test_the_request_timeout_counts_the_wait_for_a_place(start: Callable[..., Proxy]) -> None:
    proxy = start(Stranger(lambda: iter([])), request_timeout=0.5, max_num_seqs=1)

    def ask_together() -> float:
        began = time.monotonic()
        with ThreadPoolExecutor(3) as pool:
            assert list(pool.map(lambda _: ask(proxy)[0], range(3))) == [504] * 3
        return time.monotonic() - began

    assert undisturbed(ask_together, 1.4) < 1.4, "one after the other they take 1.5 s"


@pytest.mark.parametrize("how", ["timeout", "stop"])
def test_a_client_that_does_not_read_holds_nothing_up(
    start: Callable[..., Proxy], monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr(relay, "LAST_SECONDS", 0.2)

    def answer() -> Iterator[bytes]:
        yield HEAD
        while True:
            yield chunk(b"data: %b\n\n" % (b"x" * 60_000))

    stranger = Stranger(answer)
    proxy = start(stranger, **({"request_timeout": 0.5} if how == "timeout" else {}))
    with socket.create_connection(("127.0.0.1", proxy.port)) as client:
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 2\r\n\r\n{}")
        before = 0
        while not before or stranger.num_sent != before:
            before = stranger.num_sent
            time.sleep(0.2)
        if how == "stop":
            proxy.run(proxy.upstream.stop(0.1))
        proxy.wait_idle()


def test_bodies_that_wait_for_an_upstream_are_bounded(
    start: Callable[..., Proxy], monkeypatch: pytest.MonkeyPatch
) -> None:
    may_answer = threading.Event()

    class Waiting(Raw):
        def _serve(self, connection: socket.socket) -> None:
            with connection, contextlib.suppress(OSError):
                while connection.recv(1 << 16).startswith(b"GET"):
                    connection.sendall(OK)
                may_answer.wait(60)
                connection.sendall(OK.replace(b"\r\n", b"\r\nconnection: close\r\n", 1))
                while connection.recv(1 << 16):
                    pass

    monkeypatch.setattr(upstream, "MAX_REQUEST_BYTES", 1_000_000)
    proxy = start(Waiting())

    def send(num_bytes: int) -> int:
        return proxy.client.post("/v1/completions", content=b'{"prompt": "%b"}' % (b"x" * num_bytes)).status_code

    with ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(send, 600_000) for _ in range(4)]
        while sum(each.done() for each in asked) < 3:
            time.sleep(0.01)
        may_answer.set()
        assert sorted(each.result() for each in asked) == [200, 429, 429, 429]
    assert send(1_100_000) == 200, "one is always accepted"


# --- paths ---


@pytest.mark.parametrize(
    "target",
    [
        *(b"/v1/../sleep", b"/v1/./models", b"/v1/..%2f..%2fadmin/keys", b"/v1/%2e%2e/sleep", b"/v1/models/..%2fsleep"),
        *(b"/v1/responses/%2e%2e", b"/v1/responses/..", b"/v1/responses/.", b"/v1/responses/%2E%2E/cancel"),
        *(b"/v1/responses/..%5csleep/cancel", b"/v1/responses/a%5c..%5csleep", b"/v1/responses/%252e%252e/cancel"),
        *(b"/v1/responses/%252e%252e%252fsleep/cancel", b"/v1/responses/a%2fb/cancel", b"/v1%2fcompletions"),
        *(b"/v1/responses/..;/cancel", b"/v1/responses/a%3b/cancel", b"/v1/responses/a%3fb/cancel"),
        *(b"/v1/responses/a%23b/cancel", b"/v1/responses/a%00b/cancel", b"/v1/responses/a%0d%0ab/cancel"),
        *(b"/v1/http://evil.test/x", b"/v1/..//evil.test/%2e%2e/x?y", b"//evil.test/v1/models/../sleep"),
        *(b"/sleep?mode=abort", b"/wake_up", b"/admin/keys", b"/v1/load_lora_adapter", b"/v1/unload_lora_adapter"),
        *(b"/reset_prefix_cache", b"/collective_rpc", b"/v1/kv_events", b"/v2/repository/models/m/load", b"/api/pull"),
        *(b"/v1/requests/r/timeline", b"/v1/organization/users", b"/v1/fine_tuning/jobs", b"/v1/models/m", b"/v1"),
    ],
)
def test_other_paths_are_not_forwarded(start: Callable[..., Proxy], target: bytes) -> None:
    raw = Raw()
    status = int(raw_request(start(raw, upstream_api_key="sk-up"), target).split()[1])
    assert status in (400, 403, 404, 405)
    assert not raw.requests


@pytest.mark.parametrize(
    ("target", "sent"),
    [
        (b"/v1/completions", b"/v1/completions"),
        (b"//v1//chat/completions/", b"/v1/chat/completions"),
        (b"/v1/responses/resp_1.a-b~c/cancel?x=..%2f", b"/v1/responses/resp_1.a-b~c/cancel?x=..%2f"),
        (b"/v2/rerank", b"/v2/rerank"),
        (b"http://evil.test/v1/completions", b"/v1/completions"),
    ],
)
def test_paths_of_models_are_forwarded(start: Callable[..., Proxy], target: bytes, sent: bytes) -> None:
    raw = Raw()
    assert raw_request(start(raw), target).split()[1] == b"200"
    assert raw.requests[0].split()[1] == sent


def test_a_models_name_may_have_a_slash(start: Callable[..., Proxy]) -> None:
    seen: list[bytes] = []

    class Listing(Raw):
        def _serve(self, connection: socket.socket) -> None:
            with connection, contextlib.suppress(OSError):
                while head := connection.recv(1 << 16):
                    seen.append(head.split()[1])
                    connection.sendall(OK)

    proxy = start(Listing())
    for name in ("owner/name", "owner%2Fname"):
        assert proxy.client.get(f"/v1/models/{name}").status_code == 200
    assert seen.count(b"/v1/models/owner/name") == 2
    assert proxy.client.get("/v1/models/..%2F..%2Fsleep").status_code == 400
    assert proxy.client.delete("/v1/models/owner").status_code == 405


# --- usage ---


def watch_charges(proxy: Proxy) -> Callable[[], int]:
    """Count what is charged from now on; returns a function that tells it."""
    account: Account = proxy.app.state.services.keys.caller("").account
    before = account.num_tokens

    def charged() -> int:
        proxy.wait_idle()
        return account.num_tokens - before

    return charged


@pytest.mark.parametrize(
    ("usage", "charged"),
    [
        (b'{"prompt_tokens": 3, "completion_tokens": 4}', 7),
        (b'{"input_tokens": 3, "output_tokens": 4}', 7),
        (b'{"prompt_tokens": -1000000, "completion_tokens": 1}', 0),
        (b'{"prompt_tokens": 1, "completion_tokens": -1}', 0),
        (b'{"prompt_tokens": 1e3, "completion_tokens": 1}', 0),
        (b'{"prompt_tokens": 1.5}', 0),
        (b'{"prompt_tokens": true}', 0),
        (b'{"prompt_tokens": "3"}', 0),
        (b'{"prompt_tokens": NaN}', 0),
        (b'{"prompt_tokens": 99999999999999999999999999}', 0),
        (b'{"prompt_tokens": 100000001}', 0),
        (b'{"prompt_tokens": ' + b"9" * 5000 + b"}", 0),
        (b'{"prompt_tokens": null, "completion_tokens": 2}', 2),
        (b"[1]", 0),
        (b"null", 0),
        (b'{"a": ' * 5000, 0),
    ],
)
def test_usage_is_what_it_may_be(
    start: Callable[..., Proxy], usage: bytes, charged: int, caplog: pytest.LogCaptureFixture
) -> None:
    body = b'{"usage": %b}' % usage
    proxy = start(Raw(PLAIN + b"content-length: %d\r\n\r\n%b" % (len(body), body)))
    count = watch_charges(proxy)
    with caplog.at_level(logging.WARNING):
        assert proxy.client.post("/v1/completions", json=PROMPT).content == body
    assert count() == charged
    assert ("is ignored" in caplog.text) == (not charged and usage[:1] == b"{")


@pytest.mark.parametrize("cut", [1 << 20, 7])
@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
def test_usage_and_events_of_a_stream(start: Callable[..., Proxy], end: bytes, cut: int) -> None:
    """Wherever it is cut, and whatever ends its lines; usage may be in another object, and in several events."""
    events = [
        b'event: message_start%bdata: {"message": {"usage": {"input_tokens": 30, "output_tokens": 1}}}',
        b'data: {"text": "usage"}',
        b'data: {"usage": {"output_tokens": 9}}',
        b"data: [DONE]",
    ]
    data = b"".join(event.replace(b"%b", end) + end + end for event in events)
    pieces = b"".join(chunk(data[i : i + cut]) for i in range(0, len(data), cut))
    proxy = start(Raw(HEAD + pieces + b"0\r\n\r\n", HEAD + pieces.replace(b"usage", b"nosee") + b"0\r\n\r\n"))
    count = watch_charges(proxy)
    assert proxy.client.post("/v1/messages", json=PROMPT).content == data
    assert count() == 39
    proxy.client.post("/v1/messages", json=PROMPT)
    assert count() - 39 == 3 or cut == 7, "without usage, an event is a token"
