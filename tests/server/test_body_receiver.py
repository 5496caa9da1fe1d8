"""Bodies while they arrive: content codings, size limits, and decoding in threads."""

from __future__ import annotations

import asyncio
import gzip
import json
import random
import select
import socket
import threading
import time
import zlib
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from octavo_server.http import request_body
from octavo_server.http.connection_limits import ByteBudget, Share
from octavo_server.http.request_body import PIECE_BYTES, BodyDecoder, measure
from tests.server.conftest import Served
from tests.server.in_process import MAX_MODEL_LEN
from tests.server.raw import request_bytes

JSON = {"content-type": "application/json"}
MiB = 1 << 20
BODY = b'{"prompt":"Hi","max_tokens":4}'


def post(served: Served, body: bytes, path: str = "/v1/completions", **headers: str) -> httpx.Response:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return served.client.post(path, content=body, headers=JSON | named)


def error(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]


# --- what is read ---


@pytest.mark.parametrize("coding", ["gzip", "GZIP", "x-gzip", "deflate", "identity"])
@pytest.mark.parametrize("prompt", ["Hi", "Hi" * 200, "".join(map(chr, range(32, 500)))])
def test_packed_bodies_are_read(served: Served, coding: str, prompt: str) -> None:
    body = json.dumps({"prompt": prompt[:200], "max_tokens": 4}).encode()
    pack = {"deflate": zlib.compress, "identity": bytes}.get(coding, gzip.compress)
    answer = post(served, pack(body), content_encoding=coding)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"] == post(served, body).json()["usage"]


@pytest.mark.parametrize("coding", ["br", "zstd", "compress", "gzip, gzip", "x" * 1000, "\u00e9"])
def test_other_packings_are_refused_by_name(served: Served, coding: str) -> None:
    headers = [(b"content-type", b"application/json"), (b"content-encoding", coding.encode("latin-1"))]
    answer = served.client.post("/v1/completions", content=BODY, headers=headers)
    assert error(answer) == (415, "unsupported_content_encoding")
    assert "gzip" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "packed",
    [b"", BODY, gzip.compress(BODY)[:-9], gzip.compress(BODY) + b"x", b"\x1f\x8b" * 50],
    ids=["nothing", "plain", "cut", "longer", "broken"],
)
def test_a_body_with_a_wrong_content_encoding(served: Served, packed: bytes) -> None:
    assert error(post(served, packed, content_encoding="gzip")) == (400, "invalid_encoding")


def test_what_unpacks_to_too_much(serve_app: Any) -> None:
    served = serve_app(max_request_bytes=MiB)
    bomb = gzip.compress(b" " * (64 * MiB), 1)
    assert len(bomb) < MiB
    started = time.process_time()
    gzip.decompress(bomb)
    whole, started = time.process_time() - started, time.process_time()
    assert error(post(served, bomb, content_encoding="gzip")) == (413, "request_too_large")
    assert time.process_time() - started < whole


def test_a_byte_order_mark_is_passed_over(served: Served) -> None:
    assert post(served, b"\xef\xbb\xbf" + BODY).status_code == 200


@pytest.mark.parametrize("body", [b"", b" \r\n\t", b"\xef\xbb\xbf"])
def test_an_empty_body_is_said_to_be_empty(served: Served, body: bytes) -> None:
    answer = post(served, body)
    assert error(answer) == (400, "invalid_json")
    assert "empty" in answer.json()["error"]["message"]


# --- what is in them ---


def many(what: bytes, count: int, field: bytes = b"zzz") -> bytes:
    return b'{"prompt":"Hi","max_tokens":4,"%b":[' % field + what + (b"," + what) * (count - 1) + b"]}"


@pytest.mark.parametrize(
    "body",
    [
        many(b"{}", 140_000),
        many(b"[]", 140_000, b"messages"),
        many(b"1", 1_100_000),
        b"{" + b",".join(b'"%d":1' % i for i in range(140_000)) + b"}",
    ],
    ids=["objects", "arrays", "numbers", "fields"],
)
def test_more_than_any_request_needs_is_refused_before_it_is_built(
    served: Served, body: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("octavo_server.http.request_body._split", None)
    assert error(post(served, body)) == (413, "request_too_large")


def test_what_only_looks_like_much_is_served(served: Served) -> None:
    """Brackets and commas of a text are no values, whatever quotes and backslashes are among them."""
    text = json.dumps('[{:,}]\\"' * 200_000).encode()
    answer = post(served, b'{"prompt":"Hi","max_tokens":4,"zzz":%b}' % text)
    assert answer.status_code == 200
    assert answer.headers["x-octavo-unknown-fields"] == "zzz"


def test_a_million_token_ids_are_read(served: Served) -> None:
    answer = post(served, json.dumps({"prompt": [65] * 1_000_000}).encode())
    assert error(answer) == (400, "context_length_exceeded")
    answer = post(served, json.dumps({"prompt": [[65] * (MAX_MODEL_LEN - 1)] * 16, "max_tokens": 1}).encode())
    assert answer.status_code == 200
    assert answer.json()["usage"]["prompt_tokens"] == 16 * (MAX_MODEL_LEN - 1)


def test_fields_that_no_api_defines_are_not_decoded(served: Served) -> None:
    """So they cost nothing, and may hold what would not fit."""
    assert post(served, b'{"prompt":"Hi","max_tokens":4,"zzz":' + b"9" * 5000 + b"}").status_code == 200


def test_large_bodies_are_decoded_in_a_thread(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = []
    read = BodyDecoder.read

    def spy(decoder: Any, *args: Any) -> Any:
        threads.append(threading.current_thread())
        return read(decoder, *args)

    monkeypatch.setattr(BodyDecoder, "read", spy)
    for size in (10, 100_000):
        post(served, json.dumps({"prompt": "x" * size}).encode())
    small, large = threads
    assert small is served._thread
    assert large is not served._thread


def reference(value: Any) -> tuple[int, int]:
    """Containers and depth."""
    if isinstance(value, dict):
        below = [reference(item) for item in value.values()]
        return 1 + len(value) + sum(n for n, _ in below), 1 + max([d for _, d in below], default=0)
    if isinstance(value, list):
        below = [reference(item) for item in value]
        return 1 + sum(n for n, _ in below), 1 + max([d for _, d in below], default=0)
    return 0, 0


def anything(rng: random.Random, level: int = 0) -> Any:
    kind = rng.randrange(6 if level < 6 else 4)
    if kind < 4:
        text = "".join(rng.choice('\\"[]{},:a\u00e9\U0001f600\n') for _ in range(rng.randrange(12)))
        return (text, rng.random(), None, text * 5)[kind]
    items = [anything(rng, level + 1) for _ in range(rng.randrange(6))]
    return items if kind == 4 else {f"{i}{item}"[:9]: item for i, item in enumerate(items)}


@pytest.mark.parametrize("seed", range(40))
def test_sizes_are_those_of_what_is_built(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(seed)
    monkeypatch.setattr("octavo_server.http.request_body.PIECE_BYTES", rng.choice([1, 2, 3, 7, 64]))
    value = [anything(rng) for _ in range(8)]
    text = json.dumps(value, ensure_ascii=rng.random() < 0.5).encode()
    num_containers, depth = reference(value)
    size = measure(text)
    assert (size.num_containers, size.depth) == (num_containers, depth)


def test_measuring_ends_at_the_bound() -> None:
    assert measure(b"[" + b"1," * 500_000, max_values=10).num_values <= PIECE_BYTES


# --- all of them together ---


def test_the_largest_share_is_given_up() -> None:
    gone: list[str] = []
    budget = ByteBudget(100)
    shares: dict[str, Share] = {name: budget.share(lambda name=name: gone.append(name)) for name in "abc"}
    shares["a"].resize(60)
    shares["b"].resize(40)
    assert gone == []
    shares["c"].resize(10)
    assert (gone, budget.num_bytes) == (["a"], 50)
    shares["a"].resize(99)
    assert budget.num_bytes == 50, "it no longer counts"
    shares["b"].settle()
    shares["c"].resize(61)
    assert gone == ["a", "c"], "what is whole stays"
    shares["b"].resize(0)
    assert budget.num_bytes == 0


def test_bodies_pause_only_when_there_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    now, pauses = 5.0, 0

    async def sleep(seconds: float) -> None:
        nonlocal pauses
        pauses += 1

    async def arrive(num_bytes: int, pieces: int) -> int:
        before = pauses
        for _ in range(pieces):
            await pace.after(num_bytes, "someone")
        return pauses - before

    monkeypatch.setattr(request_body, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(request_body, "asyncio", SimpleNamespace(sleep=sleep))
    pace = request_body.BodyPace()
    assert asyncio.run(arrive(256 << 10, 128)) == 0, "32 MiB at once"
    assert asyncio.run(arrive(256 << 10, 8)) == 8
    now += 0.5
    assert asyncio.run(arrive(1, 1024)) == 0, "half as many, and a byte counts as a piece"
    assert asyncio.run(arrive(1, 8)) == 8
    now += 3600
    assert asyncio.run(arrive(64 << 10, 512)) == 0
    assert asyncio.run(arrive(64 << 10, 1)) == 1


def test_unfinished_bodies_together(serve_app: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_body, "SPARE_BYTES", 0)
    served = serve_app(max_request_bytes=MiB)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    small = socket.create_connection(("127.0.0.1", served.port), timeout=30)
    whole = request_bytes("/v1/completions", {"prompt": "Hi", "max_tokens": 4})
    small.sendall(whole[:-5])
    clients = []
    for _ in range(8):
        clients.append(socket.create_connection(("127.0.0.1", served.port), timeout=30))
        clients[-1].sendall(head + b"Content-Length: %d\r\n\r\n" % MiB + b" " * (MiB // 2))
    deadline = time.monotonic() + 30
    answers: dict[socket.socket, bytes] = {}
    while len(answers) < 6 and time.monotonic() < deadline:
        for client in select.select(clients, [], [], 0.1)[0]:
            answers.setdefault(client, client.recv(65536))
    assert len(answers) in (6, 7), "two have room, or one where the small request's bytes were counted before theirs"
    assert all(answer.startswith(b"HTTP/1.1 503 ") for answer in answers.values())
    assert all(b"retry-after: 1" in answer.lower() for answer in answers.values())
    budget = served.app.state.services.body_receiver._budget
    assert served.call(lambda: budget.num_bytes) <= MiB
    small.sendall(whole[-5:])
    assert small.recv(4096).startswith(b"HTTP/1.1 200 ")
    for client in (*clients, small):
        client.close()
    deadline = time.monotonic() + 30
    while served.call(lambda: budget.num_bytes) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert served.call(lambda: budget.num_bytes) == 0


def test_a_form_of_many_parts_is_refused_early(served: Served) -> None:
    part = b'--x\r\nContent-Disposition: form-data; name="a"\r\n\r\nb\r\n'
    headers = {"content-type": "multipart/form-data; boundary=x"}
    started = time.process_time()
    answer = served.client.post("/v1/files", content=part * 300_000 + b"--x--\r\n", headers=headers)
    assert error(answer) == (400, "invalid_form")
    assert "32 parts" in answer.json()["error"]["message"]
    assert time.process_time() - started < 2
