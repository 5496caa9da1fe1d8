"""What attackers and broken clients send: every field with every odd value, and a case for each kind of known attack.

Nothing of it may be a 5xx, take long, show what is inside, or change what others get. The whole grid runs with
``OCTAVO_HOSTILE=all``, a sample of it otherwise.
"""

from __future__ import annotations

import json
import os
import random
import re
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from octavo.server.openai.chat import ChatBody
from octavo.server.openai.completions import CompletionBody
from tests.server.conftest import Served
from tests.server.in_process import InProcessEngine, byte_tokenizer

RUNS_ALL = os.environ.get("OCTAVO_HOSTILE") == "all"
SAMPLE = 4
MAX_SECONDS = 3.0
LEAKS = re.compile(r"0x[0-9a-f]{6,}|/work|/root|Traceback|\x1b|site-packages")

VALUES = [
    *("NaN", "Infinity", "-Infinity", "1e999", "-1e999", "-0.0", "-1", "0", "0.5", "1e-320"),
    *(str(2**31), str(2**63), str(2**64), "1" + "0" * 4000, "true", '"1"', "null", "[]", "{}", "[[]]", "[-1]"),
    *('"\\ud800"', '"\\u0000"', '"\x1b[31m"', '"' + "x" * 10_000 + '"', "[" * 200 + "]" * 200, '[{"type":7}]'),
    *('{"-1":1}', '{"99999999999":1}', '{"0":1e308}', '{"a":{"b":{}}}', "[null]", '["", ""]', '"{{ 10**10**8 }}"'),
]
BASES = {
    "/v1/completions": {"prompt": "Hi", "max_tokens": 2},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2},
    "/v1/messages": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2},
    "/v1/responses": {"input": "Hi", "max_output_tokens": 2},
    "/infer/v1/completions": {"model": "test", "prompt": "Hi", "max_tokens": 2},
}
FIELDS = {
    "/v1/completions": list(CompletionBody.__struct_fields__),
    "/v1/chat/completions": list(ChatBody.__struct_fields__),
    "/v1/messages": [
        "messages",
        "system",
        "max_tokens",
        "stop_sequences",
        "thinking",
        "tools",
        "tool_choice",
        "metadata",
    ],
    "/v1/responses": ["input", "tools", "text", "reasoning", "include", "metadata", "previous_response_id", "store"],
    "/infer/v1/completions": ["model", "prompt", "max_tokens", "top_k", "stop", "response_format"],
}
GRID = [(path, field) for path, fields in FIELDS.items() for field in fields]


@pytest.fixture(scope="module")
def target() -> Iterator[Served]:
    served = Served(InProcessEngine(), byte_tokenizer(), {"max_request_bytes": 1 << 20})
    yield served
    served.stop()


@pytest.fixture(autouse=True)
def canary(target: Served) -> Iterator[None]:
    """Somebody else's request is answered as it is alone, to the byte, and nothing is left behind."""
    yield
    answer = target.complete(prompt="canary", max_tokens=40, seed=7)
    assert answer.json()["choices"][0]["text"] == "The answer is 4, said the bird. The answ"
    assert target.engine.num_live == 0


def send(target: Served, path: str, body: bytes, **headers: str) -> httpx.Response:
    start = time.monotonic()
    answer = target.client.post(path, content=body, headers={"content-type": "application/json", **headers})
    check(answer, time.monotonic() - start)
    return answer


def check(answer: httpx.Response, seconds: float) -> None:
    # A time that the client gave is over when it says so.
    assert answer.status_code < 500 or '"deadline_exceeded"' in answer.text, answer.text[:300]
    assert seconds < MAX_SECONDS
    if answer.status_code >= 400:
        assert not LEAKS.search(answer.text), answer.text[:300]
        assert len(answer.text) < 2000
        assert answer.json()["error"]["message"]


def with_field(path: str, field: str, value: str) -> bytes:
    """The body of ``path`` with the text ``value`` as the value of ``field``."""
    rest = {name: given for name, given in BASES[path].items() if name != field}
    members = [f"{json.dumps(name)}:{json.dumps(given)}" for name, given in rest.items()]
    return ("{" + ",".join([*members, f"{json.dumps(field)}:{value}"]) + "}").encode("utf-8", "surrogatepass")


@pytest.mark.parametrize(("path", "field"), GRID, ids=[f"{path[1:]}:{field}" for path, field in GRID])
def test_odd_values(target: Served, path: str, field: str) -> None:
    values = VALUES if RUNS_ALL else random.Random(path + field).sample(VALUES, SAMPLE)
    for value in values:
        send(target, path, with_field(path, field, value))


TEMPLATE = "{{ ''.__class__.__mro__[1].__subclasses__() }}"
MESSAGES = BASES["/v1/chat/completions"]["messages"]
ATTACKS: dict[str, tuple[str, Any]] = {
    "template in the body": ("/v1/chat/completions", {"chat_template": TEMPLATE}),
    "template in the variables": ("/v1/chat/completions", {"chat_template_kwargs": {"chat_template": TEMPLATE}}),
    "messages in the variables": ("/v1/chat/completions", {"chat_template_kwargs": {"messages": []}}),
    "template as a message": ("/v1/chat/completions", {"messages": [{"role": "user", "content": TEMPLATE}]}),
    "template as a role": ("/v1/chat/completions", {"messages": [{"role": TEMPLATE, "content": "x"}]}),
    "address to fetch": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://127.1/"}}]}]},
    ),
    "file to read": (
        "/v1/messages",
        {"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "file:///"}}]}]},
    ),
    "pickled embeddings": ("/v1/completions", {"prompt_embeds": "gASVAAAAAAAAAIwCb3OUjAZzeXN0ZW2Uk5Qu"}),
    "processor by name": ("/v1/completions", {"logits_processors": ["os.system"]}),
    "adapter by path": ("/v1/completions", {"lora_path": "../../etc/passwd"}),
    "model by path": ("/v1/completions", {"model": "../../etc/passwd"}),
    "many texts": ("/v1/completions", {"prompt": ["x"] * 100_000}),
    "many choices": ("/v1/completions", {"n": 16384}),
    "last column by id -1": ("/v1/completions", {"logit_bias": {"-1": 100}}),
    "ids beyond the vocabulary": ("/v1/completions", {"prompt": [10**9]}),
    "negative ids": ("/v1/completions", {"prompt": [-1]}),
    "ids to stop at": ("/v1/completions", {"stop_token_ids": [10**9]}),
    "many stops": ("/v1/completions", {"stop": ["x"] * 10_000}),
    "empty stop": ("/v1/completions", {"stop": ""}),
    "long stop": ("/v1/completions", {"stop": "x" * 100_000}),
    "long text": ("/v1/completions", {"prompt": "x" * 900_000}),
    "long user": ("/v1/completions", {"user": "x" * 100_000}),
    "exponential regex": ("/v1/completions", {"structured_outputs": {"regex": "(a+)+" * 50 + "$"}}),
    "repeats in a regex": ("/v1/completions", {"structured_outputs": {"regex": "((a{1000}){1000}){1000}"}}),
    "deep schema": (
        "/v1/chat/completions",
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"$ref": "#"}}}},
    ),
    "endless grammar": ("/v1/completions", {"structured_outputs": {"grammar": "start: start"}}),
    "many tools": (
        "/v1/chat/completions",
        {"tools": [{"type": "function", "function": {"name": f"f{i}"}} for i in range(5000)]},
    ),
    "call with bad arguments": (
        "/v1/chat/completions",
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}, *MESSAGES]},
    ),
    "response by path": ("/v1/responses", {"previous_response_id": "../../etc/passwd"}),
}


@pytest.mark.parametrize("name", ATTACKS)
def test_attacks(target: Served, name: str) -> None:
    path, extra = ATTACKS[name]
    send(target, path, json.dumps({**BASES[path], **extra}).encode())


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"null",
        b"[]",
        b'"x"',
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b"{" + b'"a":1,' * 100_000,
        b'{"prompt":"x","prompt":"y"}',
        b'{"prompt":"\xff\xfe"}',
        b'{"prompt":"\\ud800"}',
        b"\x00" * 1000,
        b"\xef\xbb\xbf{}",
        b'{"prompt":"x"}{"prompt":"x"}',
        b"x" * (1 << 20) + b"y",
    ],
    ids=lambda body: repr(body[:16]),
)
@pytest.mark.parametrize("path", BASES)
def test_bodies_that_are_none(target: Served, path: str, body: bytes) -> None:
    assert send(target, path, body).status_code in (200, 400, 404, 413, 422)


@pytest.mark.parametrize("kind", ["files", "batches", "responses", "models"])
@pytest.mark.parametrize(
    "name", ["../../etc/passwd", "%2e%2e%2f", "%00", "%0d%0ax:y", "x" * 8000, "%ff", "a;b", "' OR 1=1 --"]
)
def test_names_are_not_paths(target: Served, kind: str, name: str) -> None:
    start = time.monotonic()
    answer = target.client.get(f"/v1/{kind}/{name}")
    check(answer, time.monotonic() - start)
    assert answer.status_code == 404


def test_compressed_bodies_are_not_opened(target: Served) -> None:
    assert (
        send(target, "/v1/completions", b"\x1f\x8b" + b"\x00" * 100, **{"content-encoding": "gzip"}).status_code == 400
    )
