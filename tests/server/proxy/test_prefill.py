"""A proxy before prefill and decode servers, and before several plain ones: what each is sent."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from octavo_fleet.proxy import prefill, upstream_server
from octavo_fleet.proxy.prefill import PrefillPrompt
from tests.server.proxy.proxied import Proxy

PARAMS = {"do_remote_prefill": True, "remote_host": "127.0.0.1", "remote_port": 1, "remote_request_id": "t"}
LONG = "tell me " * 400


class Backend:
    """Records what it is sent, and answers with its name, and with ``more`` members."""

    def __init__(self, name: str, **more: Any) -> None:
        self.name, self.more, self.status = name, more, 200
        self.sent: list[tuple[str, dict[str, Any]]] = []
        self.hangs = threading.Event()
        self.hangs.set()
        backend = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.answer({})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                backend.sent.append((self.path, body))
                self.answer({"by": backend.name, "choices": [], **backend.more})

            def answer(self, body: dict[str, Any]) -> None:
                backend.hangs.wait(20)
                data = json.dumps(body).encode()
                self.send_response(backend.status if self.command == "POST" else 200)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, format: str, *args: Any) -> None:
                """Says nothing."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    def stop(self) -> None:
        self.hangs.set()
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def backends() -> Iterator[Callable[..., Backend]]:
    running: list[Backend] = []

    def make(name: str, **more: Any) -> Backend:
        running.append(Backend(name, **more))
        return running[-1]

    yield make
    for backend in running:
        backend.stop()


def ask(proxy: Proxy, prompt: str = LONG, **fields: Any) -> Any:
    answer = proxy.client.post("/v1/completions", json={"model": "m", "prompt": prompt, "max_tokens": 9, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()["by"]


def test_a_long_prompt_goes_to_a_prefill_server_and_then_to_a_decode_server(
    start: Callable[..., Proxy], backends: Callable[..., Backend]
) -> None:
    first, second = backends("prefill", kv_transfer_params=PARAMS), backends("decode")
    proxy = start(second.url, prefill_upstream=first.url)
    assert ask(proxy, stream_options={"include_usage": True}, stream=False, logprobs=2) == "decode"
    ((path, asked),) = first.sent
    whole = {"model": "m", "prompt": LONG}
    assert (path, asked) == (
        "/v1/completions",
        {**whole, "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}},
    )
    answered = {**whole, "max_tokens": 9, "stream_options": {"include_usage": True}, "stream": False, "logprobs": 2}
    assert second.sent == [("/v1/completions", {**answered, "kv_transfer_params": PARAMS})]
    for body in ({"prompt": "short"}, {"n": 2}, {"echo": True}, {"kv_transfer_params": PARAMS}, {"prompt": LONG + "?"}):
        assert ask(proxy, **body) == "decode"  # the last one's prompt was sent there before
    assert len(first.sent) == 1
    assert [body.get("kv_transfer_params") for _, body in second.sent[1:]] == [None, None, None, PARAMS, None]


@pytest.mark.parametrize("field", ["cache_salt", "model"])
def test_equal_prompts_that_share_no_blocks_are_told_apart(
    field: str, start: Callable[..., Proxy], backends: Callable[..., Backend]
) -> None:
    first, second = backends("prefill", kv_transfer_params=PARAMS), backends("decode")
    proxy = start(second.url, prefill_upstream=first.url)
    for value in ("one", "another", "one"):
        ask(proxy, **{field: value})
    assert [body[field] for _, body in first.sent] == ["one", "another"]


def test_what_is_no_json_and_what_has_a_key_go_to_the_decode_server_alone(
    start: Callable[..., Proxy], backends: Callable[..., Backend]
) -> None:
    """A request with an idempotency key must be the same each time it is sent."""
    first, second = backends("prefill", kv_transfer_params=PARAMS), backends("decode")
    prompt = PrefillPrompt("v1/completions", b'{"\xff": 1}', "")
    assert not prompt.fields
    proxy = start(second.url, prefill_upstream=first.url)
    body = {"model": "m", "prompt": LONG, "max_tokens": 9}
    for _ in range(2):
        answer = proxy.client.post("/v1/completions", json=body, headers={"Idempotency-Key": "a-key-of-some-length"})
        assert answer.json()["by"] == "decode"
    assert not first.sent
    assert second.sent == [("/v1/completions", body)] * 2


@pytest.mark.parametrize("trouble", ["down", "error", "plain", "hangs"])
def test_the_decode_server_gets_what_a_prefill_server_does_not_compute(
    trouble: str, start: Callable[..., Proxy], backends: Callable[..., Backend], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upstream_server, "CHECK_SECONDS", 0.1)
    monkeypatch.setattr(prefill, "CHECK_SECONDS", 0.1)
    more = {} if trouble == "plain" else {"kv_transfer_params": PARAMS}
    first, second = backends("prefill", **more), backends("decode")
    proxy = start(second.url, prefill_upstream=first.url)
    if trouble == "down":
        first.stop()
    elif trouble == "error":
        first.status = 503
    elif trouble == "hangs":
        monkeypatch.setattr(proxy.upstream._servers[0], "_max_slow_checks", 10**9)  # the decode server may be slow
        monkeypatch.setattr(upstream_server, "HEALTH_SECONDS", 0.2)
        first.hangs.clear()
    assert ask(proxy) == "decode"
    assert "kv_transfer_params" not in second.sent[0][1]


def test_an_answer_that_comes_byte_by_byte_is_not_waited_for(
    start: Callable[..., Proxy], backends: Callable[..., Backend], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefill, "BODY_SECONDS", 0.3)
    is_over, sent = threading.Event(), list[int]()

    def trickle(self: BaseHTTPRequestHandler) -> None:
        self.send_response(200)
        self.send_header("content-length", "1000")
        self.end_headers()
        while not is_over.wait(0.05):
            sent.append(self.wfile.write(b" "))

    first, second = backends("prefill", kv_transfer_params=PARAMS), backends("decode")
    proxy = start(second.url, prefill_upstream=first.url)
    monkeypatch.setattr(first.server.RequestHandlerClass, "do_POST", trickle)
    assert ask(proxy) == "decode"
    is_over.set()
    assert 1 <= len(sent) < 500
    assert "kv_transfer_params" not in second.sent[0][1]


def test_of_several_servers_one_gets_the_prompts_that_begin_alike(
    start: Callable[..., Proxy], backends: Callable[..., Backend]
) -> None:
    one, two = backends("one"), backends("two")
    proxy = start(f"{one.url},{two.url}")
    first = ask(proxy)
    assert {ask(proxy, LONG + str(number)) for number in range(5)} == {first}
    assert proxy.client.post("/v1/responses", json={"input": LONG}).json()["by"] == "one"  # which stores it
    gone, other = (one, two) if first == "one" else (two, one)
    gone.stop()
    assert ask(proxy) == other.name
