"""What attackers and broken clients send: every field with every odd value, and a case for each kind of known attack.

It goes to a real server with a small model of random weights. Nothing of it may be a 5xx, cost much, show what is
inside, end the engine, or change a bit of what others get. The whole grid runs with ``OCTAVO_HOSTILE=all``, and then,
on a machine that has nothing else to do, times are held to; otherwise a sample of it, most of which is for `make
nightly`, held to the server's own processor time. ``OCTAVO_HOSTILE_RECORD`` names a file for the time of each case, in
lines of JSON.
"""

from __future__ import annotations

import json
import os
import random
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

import octavo
from octavo.errors import InvalidParameter
from octavo_server.dialects.chat_reply import FieldNames
from octavo_server.dialects.gemini import body as gemini
from octavo_server.dialects.openai import chat_body, completions
from octavo_server.image_files import MARKDOWN_IMAGE
from tests.conftest import Server, start_server
from tests.llm.tiny import write_checkpoint
from tests.server.canary import Canary
from tests.tiers import one_in

pytestmark = pytest.mark.slow  # a real engine process

RUNS_ALL = os.environ.get("OCTAVO_HOSTILE") == "all"
RECORD = os.environ.get("OCTAVO_HOSTILE_RECORD")
SAMPLE = 10
ONE_FIELD_IN, ONE_CASE_IN = (1, 1) if RUNS_ALL else (5, 3)
"""What runs each time of the grid, and of other cases of several parameters."""
LEAST_CASES = 3600 if RUNS_ALL else 350
SECONDS, BOMB_SECONDS = 1.0, 3.0
"""What a case may cost: of the front process's own time, and with ``OCTAVO_HOSTILE=all`` of the clock's."""
MAX_GAP = 0.25
"""Seconds between two tokens of somebody else's stream, with ``OCTAVO_HOSTILE=all``."""
PATIENCE = 120.0
PLACES = "|".join(re.escape(str(place)) for place in (Path(octavo.__file__).parent, sys.prefix))
LEAKS = re.compile(rf"0x[0-9a-f]{{6,}}|{PLACES}|Traceback|\x1b|site-packages")
JSON = {"content-type": "application/json"}
SETTINGS = ("--load-format", "dummy", "--num-kv-blocks", "64", "--max-request-bytes", str(1 << 20))

VALUES = [
    *("NaN", "Infinity", "-Infinity", "1e999", "-1e999", "-0.0", "-1", "0", "0.5", "1e-320"),
    *(str(2**31), str(2**63), str(2**64), "1" + "0" * 4000, "true", '"1"', "null", "[]", "{}", "[[]]", "[-1]"),
    *('"\\ud800"', '"\\u0000"', '"\x1b[31m"', '"' + "x" * 10_000 + '"', "[" * 200 + "]" * 200, '[{"type":7}]'),
    *('{"-1":1}', '{"99999999999":1}', '{"0":1e308}', '{"a":{"b":{}}}', "[null]", '["", ""]', '"{{ 10**10**8 }}"'),
]
BASES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "Hi", "max_tokens": 2},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2},
    "/v1/messages": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2},
    "/v1/responses": {"input": "Hi", "max_output_tokens": 2},
    "/v1beta/models/test:generateContent": {
        "contents": [{"parts": [{"text": "Hi"}]}],
        "generationConfig": {"maxOutputTokens": 2},
    },
    "/infer/v1/completions": {"model": "test", "prompt": "Hi", "max_tokens": 2},
}
FIELDS = {
    "/v1/completions": list(completions.decoder.decoders),
    "/v1/chat/completions": list(chat_body.decoder.decoders),
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
    "/v1beta/models/test:generateContent": list(gemini.content_decoder.decoders),
    "/infer/v1/completions": ["model", "prompt", "max_tokens", "top_k", "stop", "response_format"],
}
GRAMMARS = {"response_format", "structured_outputs", "guided_json", "guided_regex", "guided_grammar", "guided_choice"}
"""Fields whose values are programs of a kind: trying one out may take its whole time."""
GRID = [(path, field) for path, fields in FIELDS.items() for field in fields]


class Target:
    """The server that is attacked."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.client = httpx.Client(base_url=server.url, timeout=PATIENCE)
        self.client.post("/v1/completions", json={"prompt": "x", "guided_regex": "a"})  # starts the grammars' process
        self.canary = Canary(server.url)

    def send(self, method: str, path: str, is_bomb: bool = False, **request: Any) -> httpx.Response:
        """One case, with all that is asked of its answer."""
        started, spent = time.monotonic(), self._processor_seconds()
        answer = self.client.request(method, path, **request)
        seconds, spent = time.monotonic() - started, self._processor_seconds() - spent
        if RECORD:
            case = os.environ["PYTEST_CURRENT_TEST"].partition("::")[2]
            record = {"case": case, "status": answer.status_code, "seconds": seconds, "processor_seconds": spent}
            with Path(RECORD).open("a") as file:
                file.write(json.dumps(record) + "\n")
        # A time that the client gave is over when it says so.
        assert answer.status_code < 500 or '"deadline_exceeded"' in answer.text, answer.text[:300]
        allowed = BOMB_SECONDS if is_bomb else SECONDS
        assert spent < allowed
        assert not RUNS_ALL or seconds < allowed
        if answer.status_code >= 400:
            assert not LEAKS.search(answer.text), answer.text[:300]
            assert len(answer.text) < 2000
            assert answer.json()["error"]["message"]
        return answer

    def post(self, path: str, body: bytes, is_bomb: bool = False) -> httpx.Response:
        return self.send("POST", path, is_bomb, content=body, headers=JSON)

    def _processor_seconds(self) -> float:
        """What the front process used so far; fields 14 and 15 of its line are ticks."""
        line = Path(f"/proc/{self.server.process.pid}/stat").read_text()
        return sum(map(int, line.rpartition(")")[2].split()[11:13])) / os.sysconf("SC_CLK_TCK")

    def stats(self) -> dict[str, Any]:
        found: dict[str, Any] = self.server.get("/stats").json()
        return found


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    server = start_server("--model", str(write_checkpoint(tmp_path_factory.mktemp("tiny"))), *SETTINGS)
    target = Target(server)
    yield target
    target.canary.stop(least=4)
    target.client.close()
    found = target.stats()
    assert target.canary.count >= 4
    assert target.canary.strange == []
    assert (found["num_restarts"], found["num_live"], found["num_used_blocks"]) == (0, 0, 0)
    assert not RUNS_ALL or target.canary.slowest_gap < MAX_GAP
    server.stop()


@pytest.fixture(autouse=True)
def no_other_request_is_changed(target: Target) -> Iterator[None]:
    """The first test after which a stream differs is the one that is shown."""
    yield
    assert target.canary.strange == []


def with_field(path: str, field: str, value: str) -> bytes:
    """The body of ``path`` with the text ``value`` as the value of ``field``."""
    rest = {name: given for name, given in BASES[path].items() if name != field}
    members = [f"{json.dumps(name)}:{json.dumps(given)}" for name, given in rest.items()]
    return ("{" + ",".join([*members, f"{json.dumps(field)}:{value}"]) + "}").encode("utf-8", "surrogatepass")


@one_in(ONE_FIELD_IN)
@pytest.mark.parametrize(("path", "field"), GRID, ids=[f"{path[1:]}:{field}" for path, field in GRID])
def test_odd_values(target: Target, path: str, field: str) -> None:
    values = VALUES if RUNS_ALL else random.Random(path + field).sample(VALUES, SAMPLE)
    for value in values:
        target.post(path, with_field(path, field, value), is_bomb=field in GRAMMARS)


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
    "allowed ids beyond the vocabulary": ("/v1/completions", {"allowed_token_ids": [10**9]}),
    "all ids allowed": ("/v1/completions", {"allowed_token_ids": list(range(100_000))}),
    "nothing left": ("/v1/completions", {"allowed_token_ids": [97], "bad_words": ["a"]}),
    "many bad words": ("/v1/completions", {"bad_words": ["x" * 256] * 64}),
    "more bad words": ("/v1/completions", {"bad_words": ["x"] * 10_000}),
    "many texts to choose from": ("/v1/completions", {"best_of": 16384}),
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


BOMBS = {"exponential regex", "repeats in a regex", "deep schema", "endless grammar", "many tools", "many bad words"}
"""Attacks that mean to cost much."""


@pytest.mark.parametrize("name", ATTACKS)
def test_attacks(target: Target, name: str) -> None:
    path, extra = ATTACKS[name]
    target.post(path, json.dumps({**BASES[path], **extra}).encode(), is_bomb=name in BOMBS)


BODIES = [
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
]


@one_in(ONE_CASE_IN)
@pytest.mark.parametrize("body", BODIES, ids=lambda body: repr(body[:16]))
@pytest.mark.parametrize("path", BASES)
def test_bodies_that_are_none(target: Target, path: str, body: bytes) -> None:
    assert target.post(path, body).status_code in (200, 400, 404, 413, 422)


KINDS = ["files", "batches", "responses", "models"]
NAMES = ["../../etc/passwd", "%2e%2e%2f", "%00", "%0d%0ax:y", "x" * 8000, "%ff", "a;b", "' OR 1=1 --"]


@one_in(ONE_CASE_IN)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", NAMES)
def test_names_are_not_paths(target: Target, kind: str, name: str) -> None:
    assert target.send("GET", f"/v1/{kind}/{name}").status_code == 404


def test_packed_bodies_that_are_none(target: Target) -> None:
    headers = {**JSON, "content-encoding": "gzip"}
    answer = target.send("POST", "/v1/completions", content=b"\x1f\x8b" + b"\x00" * 100, headers=headers)
    assert answer.status_code == 400


def test_the_corpus_is_large() -> None:
    num_odd = len(GRID[::ONE_FIELD_IN]) * (len(VALUES) if RUNS_ALL else SAMPLE)
    num_others = len(range(0, len(BODIES) * len(BASES), ONE_CASE_IN)) + len(
        range(0, len(KINDS) * len(NAMES), ONE_CASE_IN)
    )
    print(f"{num_odd + num_others + len(ATTACKS) + 1} cases")
    assert num_odd + num_others + len(ATTACKS) + 1 >= LEAST_CASES


def test_texts_of_clients_are_read_once() -> None:
    """Each pattern took the square of a text's length, of which there are millions of characters."""
    assert MARKDOWN_IMAGE.search("![" * 1_000_000) is None
    assert MARKDOWN_IMAGE.split("a ![x](b) ![c ![](d)") == ["a ", "b", " ![c ", "d", ""]
    for told in ("'" + "a" * 1_000_000 + " b'", "'tools[" + "9" * 5_000 + "]'", "'tools[0].name'"):
        with pytest.raises(InvalidParameter) as refused, FieldNames({}, {"tools": ["f"]}).in_errors():
            raise InvalidParameter("tools", told)
        assert refused.value.message == told.replace("tools[0].name", "f.name")
