"""What a proxy adds to its upstream: keys, quotas, limits, metrics, retries; and what it does when that fails."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import shlex
import socket
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from octavo.config import ServeConfig
from octavo.errors import ConfigError, OctavoError, Withdrawn
from octavo.telemetry.cache_view import SessionOrder, SessionReport, SessionView
from octavo_fleet.proxy import upstream as upstream_module
from octavo_fleet.proxy.upstream import Upstream
from tests.server.conftest import Served
from tests.server.in_process import ANSWER, InProcessEngine, byte_tokenizer
from tests.server.proxy.proxied import HEAD, OK, Proxy, Raw, chunk
from tests.server.raw import connect
from tests.server.test_keys import bearer, key_file, line
from tests.tiers import nightly_after
from tests.timing import undisturbed

PROMPT: dict[str, Any] = {"prompt": "Hi", "max_tokens": 4}


def upstream(**settings: Any) -> Served:
    return Served(InProcessEngine(), byte_tokenizer(), settings)


def metric(proxy: Proxy, name: str, **labels: str) -> float:
    proxy.wait_idle()
    families = text_string_to_metric_families(proxy.client.get("/metrics").text)
    samples = [sample for family in families for sample in family.samples]
    return sum(s.value for s in samples if s.name == name and labels.items() <= s.labels.items())


@pytest.mark.parametrize("stream", [False, True])
def test_bodies_and_responses_are_unchanged(start: Callable[..., Proxy], stream: bool) -> None:
    frames = b'data: {"x": 1}\n\n: \xff\x00 kept\n\n' + b"data: [DONE]\n\n"
    body = b'{"prompt" :  "\xc3\xa9", "unknown": 1e0 }'
    plain = b"HTTP/1.1 418 T\r\ncontent-type: application/x; y=1\r\nx-own: 1\r\ncontent-length: 3\r\n\r\n{ }"
    raw = Raw(HEAD + chunk(frames) + b"0\r\n\r\n" if stream else plain)
    proxy = start(raw, upstream_api_key="sk-up")
    headers = {"content-type": "application/json", "authorization": "Bearer mine", "x-extra": "1"}
    response = proxy.client.post("/v1/completions?a=%20b", content=body, headers=headers)
    if stream:
        assert response.content == frames
        assert response.headers["content-type"] == "text/event-stream"
    else:
        assert (response.status_code, response.content) == (418, b"{ }")
        assert (response.headers["content-type"], response.headers["x-own"]) == ("application/x; y=1", "1")
    assert len(response.headers.get_list("x-request-id")) == 1
    head, _, sent = raw.requests[0].partition(b"\r\n\r\n")
    assert sent == body
    assert head.startswith(b"POST /v1/completions?a=%20b HTTP/1.1\r\n")
    assert b"x-extra: 1" in head
    assert b"Bearer sk-up" in head
    assert b"mine" not in head


def test_sessions_are_those_of_all_servers(start: Callable[..., Proxy]) -> None:
    servers = [upstream() for _ in range(3)]
    engines: list[Any] = [server.engine for server in servers]
    for number, engine in enumerate(engines):
        view = SessionView(f"s{number}", "", 2, 32, 16, 0, 16, 3.5 - number, 0.0)
        engine.session_report = SessionReport([view], is_taken=number == 1)
    try:
        one, other, prefill = (server.url for server in servers)
        client = start(f"{one},{other}", prefill_upstream=prefill).client
        assert [session["id"] for session in client.get("/v1/sessions").json()["data"]] == ["s2", "s1", "s0"]
        assert client.delete("/v1/sessions/a%2Fb").json() == {"object": "session", "id": "a/b", "deleted": True}
        assert client.post("/v1/sessions/s/prefetch").json() == {"object": "session", "id": "s", "accepted": True}
    finally:
        for server in servers:
            server.stop()
    for engine in engines:
        assert engine.session_orders[1:] == [SessionOrder("forget", "", "a/b"), SessionOrder("prefetch", "", "s")]


@pytest.mark.parametrize(("answer", "status"), [(b"HTTP/1.1 404 N\r\ncontent-length: 2\r\n\r\n{}", 404), (b"?", 502)])
def test_an_upstream_without_sessions(start: Callable[..., Proxy], answer: bytes, status: int) -> None:
    assert start(Raw(answer)).client.post("/v1/sessions/s/prefetch").status_code == status


def test_a_server_that_fails_takes_no_sessions_of_others_away(start: Callable[..., Proxy]) -> None:
    server, failing = upstream(), Raw(b"?")
    server.engine.session_report = SessionReport([], is_taken=True)
    try:
        client = start(f"{failing.url},{server.url}").client
        assert client.post("/v1/sessions/s/prefetch").json()["accepted"] is True
        assert len(failing.requests) == 1
    finally:
        server.stop()


def test_answers_in_the_form_of_sglang_count_for_all_choices(start: Callable[..., Proxy]) -> None:
    meta = {"prompt_tokens": 30, "of": "x" * 300_000, "completion_tokens": 400}
    body = json.dumps([{"text": r'"completion_tokens": 9,', "meta_info": meta}, {"meta_info": meta}]).encode()
    raw = Raw(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
    for server, num_prompt, num_output in ((upstream(), 3, 8), (raw, 60, 800)):
        proxy = start(server)
        asked = {"text": ["a", "bb"], "sampling_params": {"max_new_tokens": 4}, "return_logprob": True}
        assert len(proxy.client.post("/generate", json=asked).json()) == 2
        assert metric(proxy, "vllm:prompt_tokens_total") == num_prompt
        assert metric(proxy, "vllm:generation_tokens_total") == num_output


@pytest.mark.parametrize("path", ["/model_info", "/get_model_info"])
def test_the_model_is_described_as_for_clients_of_sglang(start: Callable[..., Proxy], path: str) -> None:
    assert start(upstream()).client.get(path).json()["is_generation"] is True


def test_the_clients_key_goes_upstream_unless_this_server_asks_for_keys(start: Callable[..., Proxy]) -> None:
    raw = Raw()
    headers = {"authorization": "Bearer mine"}
    start(raw).client.post("/v1/completions", json=PROMPT, headers=headers)
    assert (
        start(raw.url, api_key="mine").client.post("/v1/completions", json=PROMPT, headers=headers).status_code == 200
    )
    assert start(raw.url, api_key="mine").client.post("/v1/completions", json=PROMPT).status_code == 401
    assert [b"Bearer mine" in request for request in raw.requests] == [True, False]


def test_quotas_and_metrics_count_what_the_upstream_reports(start: Callable[..., Proxy], tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    digest = hashlib.sha256(b"secret").hexdigest()
    keys.write_text(f"alice {digest} tokens_per_minute=25\nboss {hashlib.sha256(b'boss').hexdigest()} admin\n")
    proxy = start(upstream(), api_key_file=str(keys))
    proxy.client.headers["authorization"] = "Bearer secret"
    assert proxy.client.post("/v1/completions", json=PROMPT).json()["usage"]["total_tokens"] == 6
    body = {**PROMPT, "max_tokens": 12, "stream": True, "stream_options": {"include_usage": True}}
    assert proxy.client.post("/v1/completions", json=body).content.endswith(b"data: [DONE]\n\n")
    assert proxy.client.post("/v1/completions", json=PROMPT).status_code == 200, "it ends with a debt"
    refused = proxy.client.post("/v1/completions", json=PROMPT)
    assert (refused.status_code, "retry-after" in refused.headers) == (429, True)
    assert proxy.client.get("/v1/models").status_code == 200
    proxy.client.headers["authorization"] = "Bearer boss"
    usage = {row["name"]: row["num_tokens"] for row in proxy.client.get("/admin/keys").json()["data"]}
    assert usage["alice"] == 6 + 14 + 6, "6 prompt tokens and 20 others"
    assert metric(proxy, "vllm:prompt_tokens_total") == 6
    assert metric(proxy, "vllm:generation_tokens_total") == 20
    assert metric(proxy, "vllm:time_to_first_token_seconds_count") == 3
    assert metric(proxy, "vllm:request_success_total", finished_reason="stop") >= 3
    assert proxy.client.get("/version").json()["backend"] == "openai"


def test_a_stream_without_usage_counts_its_events(start: Callable[..., Proxy]) -> None:
    proxy = start(upstream())
    proxy.client.post("/v1/completions", json={**PROMPT, "stream": True})
    assert 3 <= metric(proxy, "vllm:generation_tokens_total") <= 5


def test_a_full_queue(start: Callable[..., Proxy]) -> None:
    engine = InProcessEngine(runs=False)
    inner = Served(engine, byte_tokenizer(), {})
    proxy = start(inner, max_num_seqs=1, max_num_queued_reqs=1)

    async def run() -> list[int]:
        async with httpx.AsyncClient(base_url=proxy.url, timeout=20) as client:
            posts = [asyncio.create_task(client.post("/v1/completions", json=PROMPT)) for _ in range(5)]
            while sum(post.done() for post in posts) < 3 or not engine.live:
                await asyncio.sleep(0.01)
            engine.runs = True
            inner.call(engine._schedule)
            return sorted([(await post).status_code for post in posts])

    assert asyncio.run(run()) == [200, 200, 429, 429, 429]
    assert engine.max_live == 1, "the second waited here"


def test_a_queue_that_one_key_has_filled_has_room_for_another_which_comes_in_turn(
    start: Callable[..., Proxy], tmp_path: Path
) -> None:
    engine = InProcessEngine(runs=False)
    inner = Served(engine, byte_tokenizer(), {})
    keys = key_file(tmp_path, line("one", "flood"), line("two", "quiet"))
    proxy = start(inner, max_num_seqs=1, max_num_queued_reqs=9, api_key_file=keys)
    ended: list[str] = []

    async def post(client: httpx.AsyncClient, key: str) -> int:
        status = (await client.post("/v1/completions", json=PROMPT, headers=bearer(key))).status_code
        ended.append(key)
        return status

    async def run() -> tuple[list[int], int]:
        async with httpx.AsyncClient(base_url=proxy.url, timeout=20) as client:
            flood = [asyncio.create_task(post(client, "flood")) for _ in range(12)]
            while len(ended) < 2:
                await asyncio.sleep(0.01)
            quiet = asyncio.create_task(post(client, "quiet"))
            while proxy.upstream.num_live < 11:
                await asyncio.sleep(0.01)
            engine.runs = True
            inner.call(engine._schedule)
            return sorted([await one for one in flood]), await quiet

    assert asyncio.run(run()) == ([*[200] * 10, 429, 429], 200)
    assert ended.index("quiet") <= 2 + 3, "it waited for the whole flood"


def test_a_client_that_leaves_ends_the_request_upstream(start: Callable[..., Proxy]) -> None:
    engine = InProcessEngine(runs=False)
    proxy = start(Served(engine, byte_tokenizer(), {}))

    async def leave() -> None:
        _, writer = await connect(proxy.port, "/v1/completions", PROMPT)
        while not engine.live:
            await asyncio.sleep(0.01)
        writer.transport.abort()

    asyncio.run(leave())
    while not engine.aborted:
        time.sleep(0.01)
    assert len(engine.aborted) == 1
    proxy.wait_idle()


@pytest.mark.parametrize("broken", [b"", HEAD, b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n{"])
def test_a_failure_before_the_first_byte_is_retried(start: Callable[..., Proxy], broken: bytes) -> None:
    raw = Raw(broken, broken, HEAD + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")
    response = start(raw).client.post("/v1/completions", json=PROMPT)
    assert (response.status_code, response.content) == (200, b"data: [DONE]\n\n")
    assert len(raw.requests) == 3
    assert len(set(raw.requests)) == 1


@pytest.mark.parametrize(
    "path", ["/v1/batches", "/v1/files?x=1", "/v1/messages/batches", "/v1/conversations/c1/items", "/v1/responses"]
)
def test_what_may_have_been_created_is_not_asked_for_again(start: Callable[..., Proxy], path: str) -> None:
    raw = Raw(b"", HEAD)
    proxy = start(raw)
    for _ in range(2):
        assert proxy.client.post(path, json={}).status_code == 502
    assert len(raw.requests) == 2
    assert proxy.client.post(path, json={}).status_code == 200


def test_a_request_with_an_idempotency_key_goes_to_the_server_that_may_have_its_answer(
    start: Callable[..., Proxy],
) -> None:
    first, second = Raw(), Raw()
    proxy = start(f"{first.url},{second.url}")
    for server, number in zip(proxy.upstream._servers, (9, 0), strict=True):
        server.num_live = number
    proxy.client.post("/v1/completions", json=PROMPT)
    proxy.client.post("/v1/completions", json=PROMPT, headers={"Idempotency-Key": "a"})
    assert [len(server.requests) for server in (first, second)] == [1, 1]
    assert b"idempotency-key" in first.requests[0].lower()


def test_a_server_that_drains_leaves_requests_to_another(start: Callable[..., Proxy]) -> None:
    busy = b"HTTP/1.1 503 B\r\ncontent-length: 2\r\n\r\n[]"
    first, second = Raw(busy, busy, busy), Raw(OK, busy)
    proxy = start(f"{first.url},{second.url}")
    assert proxy.client.post("/v1/completions", json=PROMPT).json() == {}
    keyed = proxy.client.post("/v1/completions", json=PROMPT, headers={"Idempotency-Key": "a"})
    assert (keyed.status_code, keyed.content) == (503, b"[]")
    second.close()
    proxy.wait_ready(False, 1)
    assert proxy.client.post("/v1/completions", json=PROMPT).content == b"[]", "what the last one says is told"


def test_a_request_that_an_operator_ended_is_not_computed_again(start: Callable[..., Proxy]) -> None:
    body = json.dumps({"error": {"code": Withdrawn.code}}).encode()
    servers = [Raw(b"HTTP/1.1 503 B\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)) for _ in range(2)]
    proxy = start(",".join(server.url for server in servers))
    answer = proxy.client.post("/v1/completions", json=PROMPT)
    assert (answer.status_code, answer.content) == (503, body)
    assert sum(len(server.requests) for server in servers) == 1
    assert all(server.is_up for server in proxy.upstream._servers)


def test_an_upstream_that_is_down(start: Callable[..., Proxy]) -> None:
    raw = Raw(*[b""] * 3)
    proxy = start(raw)
    refused = proxy.client.post("/v1/completions", json=PROMPT)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "upstream_unavailable")
    assert int(refused.headers["retry-after"]) >= 1
    raw.close()
    proxy.wait_ready(False)

    def refusal() -> float:
        began = time.monotonic()
        assert proxy.client.post("/v1/completions", json=PROMPT).status_code == 503
        return time.monotonic() - began

    assert undisturbed(refusal, 0.1) < 0.1, "it is known to be down, so it is not tried"
    assert proxy.client.get("/ready").status_code == 503
    assert proxy.client.get("/health").status_code == 200
    again = Raw(port=raw.port)
    proxy.wait_ready()
    assert proxy.client.post("/v1/completions", json=PROMPT).status_code == 200
    again.close()


@pytest.mark.parametrize("cut", [b'data: {"a": 1}\n\n', b'data: {"a": 1}\n\ndata: {"b'])
def test_an_upstream_that_fails_in_the_middle_of_a_stream(start: Callable[..., Proxy], cut: bytes) -> None:
    proxy = start(Raw(HEAD + chunk(cut)))
    response = proxy.client.post("/v1/completions", json={**PROMPT, "stream": True})
    assert response.content.startswith(cut)
    *_, error, done, end = response.content.split(b"\n\n")
    assert json.loads(error.removeprefix(b"data: "))["error"]["code"] == "upstream_failed"
    assert (done, end) == (b"data: [DONE]", b"")
    assert metric(proxy, "vllm:request_success_total", finished_reason="error") == 1


def test_a_drain_ends_streams_with_an_error(start: Callable[..., Proxy]) -> None:
    class Slow(InProcessEngine):
        def _schedule(self) -> None:
            if self.live and not self._is_scheduled:
                self._is_scheduled = True
                asyncio.get_running_loop().call_later(0.02, self._run)

    proxy = start(Served(Slow(), byte_tokenizer(), {}))
    with proxy.client.stream("POST", "/v1/completions", json={**PROMPT, "max_tokens": 500, "stream": True}) as response:
        pieces = response.iter_raw()
        data = next(pieces)
        stopping = asyncio.run_coroutine_threadsafe(proxy.upstream.stop(0.3), proxy.loop)
        time.sleep(0.1)
        assert proxy.client.post("/v1/completions", json=PROMPT).status_code == 503
        data += b"".join(pieces)
    stopping.result(30)
    assert b"engine_unavailable" in data
    assert data.endswith(b"data: [DONE]\n\n")


@pytest.mark.slow
@pytest.mark.parametrize("num_clients", nightly_after(1, (4, 20)))
def test_fifty_streams_of_each_client_at_once(start: Callable[..., Proxy], num_clients: int) -> None:
    inner = Served(InProcessEngine(max_num_seqs=2000), byte_tokenizer(), {})
    proxy = start(inner)

    async def one(client: httpx.AsyncClient) -> bytes:
        body = {"prompt": "Hi", "max_tokens": len(ANSWER), "stream": True, "temperature": 0}
        async with client.stream("POST", "/v1/completions", json=body) as response:
            assert response.status_code == 200
            return b"".join([piece async for piece in response.aiter_raw()])

    async def run() -> list[bytes]:
        async with contextlib.AsyncExitStack() as stack:  # a client looks at all its connections for every request
            make = partial(httpx.AsyncClient, base_url=proxy.url, timeout=200, verify=False)
            clients = [await stack.enter_async_context(make()) for _ in range(num_clients)]
            return await asyncio.gather(*(one(client) for client in clients for _ in range(50)))

    for data in asyncio.run(run()):
        events = [json.loads(line[6:]) for line in data.split(b"\n\n") if line.startswith(b"data: {")]
        assert "".join(event["choices"][0]["text"] for event in events) == ANSWER
        assert data.endswith(b"data: [DONE]\n\n")
    proxy.wait_idle()


# --- the managed upstream ---

SERVER = """
import http.server, sys, os, pathlib
class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_GET(self):
        self.send_response(200); self.send_header("content-length", "0"); self.end_headers()
    def do_POST(self):
        os._exit(3)
    def log_message(self, *args): pass
pathlib.Path(sys.argv[2]).open("a").write(f"{os.getpid()}\\n")
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


def command(tmp_path: Path, port: int) -> str:
    script = tmp_path / "server.py"
    script.write_text(SERVER)
    return shlex.join([sys.executable, str(script), str(port), str(tmp_path / "pids")])


def pids(tmp_path: Path) -> list[int]:
    return [int(line) for line in (tmp_path / "pids").read_text().split()]


def is_alive(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().split()[2] != "Z"


def test_a_managed_upstream_is_started_restarted_and_ended(start: Callable[..., Proxy], tmp_path: Path) -> None:
    port = free_port()
    proxy = start(f"http://127.0.0.1:{port}", upstream_command=command(tmp_path, port))
    assert proxy.upstream.is_ready
    assert proxy.client.post("/v1/completions", json=PROMPT).status_code == 503, "it dies of every request"
    while len(pids(tmp_path)) < 2 or not proxy.upstream.is_ready:
        time.sleep(0.01)
    first, *_, last = pids(tmp_path)
    assert not is_alive(first)
    assert is_alive(last)
    assert proxy.client.get("/v1/models").status_code == 200
    proxy.run(proxy.upstream.stop(0))
    assert not is_alive(last)


def test_an_upstream_was_not_silent_because_nobody_listened(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine that stands still for a while."""
    monkeypatch.setattr(upstream_module, "CHECK_SECONDS", 0.05)
    told: list[float] = []

    class Process:
        async def watch(self, silent_seconds: float) -> bool:
            told.append(silent_seconds)
            return False

    async def main() -> None:
        proxied = Upstream(ServeConfig.from_flat({"backend": "openai", "upstream": "http://127.0.0.1:1"}))
        proxied._servers[0].is_up = True
        watching = asyncio.create_task(proxied._watch_process(Process()))  # type: ignore[arg-type]
        while not told:
            await asyncio.sleep(0.001)
        time.sleep(0.5)
        while len(told) < 5:
            await asyncio.sleep(0.001)
        watching.cancel()

    asyncio.run(main())
    assert told == pytest.approx([0, 0.05, 0.1, 0.15, 0.2])


def test_a_command_that_ends_before_it_answers() -> None:
    config = {"backend": "openai", "upstream": f"http://127.0.0.1:{free_port()}", "upstream_command": "/bin/false"}
    with pytest.raises(OctavoError, match="upstream_command ended with status 1"):
        asyncio.run(Upstream(ServeConfig.from_flat(config)).start())


def test_a_port_that_another_server_has(start: Callable[..., Proxy], tmp_path: Path) -> None:
    raw = Raw()
    with pytest.raises(ConfigError, match="another server"):
        start(raw.url, upstream_command=command(tmp_path, raw.port))
    raw.close()


@pytest.mark.parametrize("url", ["localhost:8001", "ftp://host", "http://", "http://host/v1?x"])
def test_invalid_urls(url: str) -> None:
    with pytest.raises(ConfigError, match="upstream"):
        Upstream(ServeConfig.from_flat({"backend": "openai", "upstream": url}))


def test_settings_without_effect_are_refused() -> None:
    for given, name in (
        ({"backend": "openai"}, "needs upstream"),
        ({"backend": "openai", "upstream": "http://x", "model": "m"}, "model"),
        ({"backend": "openai", "upstream": "http://x", "tenant_by": "key"}, "tenant_by"),
        ({"upstream": "http://x"}, "upstream"),
        ({"backend": "toy", "dtype": "float16"}, "dtype"),
        ({"backend": "instant", "scheduling_policy": "fair"}, "scheduling_policy"),
        ({"backend": "transformers", "enable_lora": True}, "enable_lora"),
    ):
        with pytest.raises(ConfigError, match=name):
            ServeConfig.from_flat(given)
