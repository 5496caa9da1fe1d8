"""Panics of libraries in Rust, which are no ``Exception``: a request ends with JSON, and no job stays unfinished."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from tokenizers import Regex, pre_tokenizers

from octavo.errors import InvalidParameter
from octavo.text.tokenizer import Tokenizer
from tests.server.batches.test_batches import begin, client
from tests.server.batches.test_batches import until_done as until_batch_done
from tests.server.conftest import Served
from tests.server.in_process import byte_tokenizer
from tests.server.responses.test_responses import until_done as until_response_done
from tests.tiers import one_in

BAD = "x" * 40
"""A text at which the regular expression of ``tokenizer`` goes back more often than its library allows."""
CHAT = {"messages": [{"role": "user", "content": BAD}]}


class Panic(BaseException):
    """Like those of the library that binds Rust to Python."""


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    tokenizer = byte_tokenizer()
    split = pre_tokenizers.Split(Regex("(x+x+)+y"), behavior="isolated")
    spell = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer._backend.pre_tokenizer = pre_tokenizers.Sequence([split, spell])  # type: ignore[assignment]
    return tokenizer


@pytest.fixture(params=["tokenizer", "panic"])
def status(request: Any, monkeypatch: pytest.MonkeyPatch) -> int:
    """The status of a text that the tokenizer gives up on, and of a panic that nothing expects."""
    if request.param == "tokenizer":
        return 400
    encode = Tokenizer.encode

    def panic(self: Tokenizer, text: str, *rest: Any, **options: Any) -> list[int]:
        if BAD in text:
            raise Panic("of some library")
        return encode(self, text, *rest, **options)

    monkeypatch.setattr(Tokenizer, "encode", panic)
    return 500


@one_in(3)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": BAD}),
        ("/v1/completions", {"prompt": BAD, "stream": True}),
        ("/v1/chat/completions", CHAT),
        ("/v1/responses", {"input": BAD}),
        ("/v1/messages", {**CHAT, "max_tokens": 4}),
        ("/api/generate", {"prompt": BAD}),
        ("/tokenize", {"prompt": BAD}),
    ],
)
def test_the_request_ends_as_any_other_and_is_logged(
    serve_app: Callable[..., Served], path: str, body: Any, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    def is_noted() -> bool:
        return any(record.name.endswith("access") and str(status) in record.getMessage() for record in caplog.records)

    served = serve_app()
    with caplog.at_level("INFO"):
        answer = served.client.post(path, json={"model": "test", **body})
        end = time.monotonic() + 30
        while not is_noted() and time.monotonic() < end:  # behind the response
            time.sleep(0.01)
    assert is_noted()
    assert answer.status_code == status, answer.text
    assert len(answer.headers["x-request-id"]) == 32
    assert answer.json()["error"]
    assert served.complete(prompt="x" * 9).status_code == 200


def test_a_line_of_a_batch_ends_and_the_others_are_answered(serve_app: Callable[..., Served], status: int) -> None:
    served = serve_app()
    bodies = [{"prompt": prompt, "max_tokens": 2} for prompt in ("a", BAD, "b")]
    rows = [
        {"custom_id": str(i), "method": "POST", "url": "/v1/completions", "body": body} for i, body in enumerate(bodies)
    ]
    batch = until_batch_done(served, begin(served, b"\n".join(json.dumps(row).encode() for row in rows)).id)
    assert batch.status == "completed"
    assert (batch.request_counts.completed, batch.request_counts.failed) == (2, 1)
    failed = json.loads(client(served).files.content(batch.error_file_id).text)
    assert (failed["custom_id"], failed["response"]["status_code"]) == ("1", status)


def test_a_background_response_ends(serve_app: Callable[..., Served], status: int) -> None:
    served = serve_app()
    begun = served.client.post("/v1/responses", json={"model": "test", "input": BAD, "background": True}).json()
    ended = until_response_done(served, begun["id"])
    assert ended["status"] == "failed"
    assert ("cannot encode this text" in ended["error"]["message"]) == (status == 400)


def test_pairs_of_texts(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidParameter, match=r"cannot encode this text: .*retry-limit-in-match"):
        tokenizer.encode_pair("a", BAD)
    assert tokenizer.encode("abc") == list(b"abc")


def test_a_tokenizer_with_slow_rules_is_kept_out_of_the_event_loop(
    serve_app: Callable[..., Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    served, in_loop, encode = serve_app(), list[bool](), Tokenizer.encode

    def watched(self: Tokenizer, text: str, *rest: Any, **options: Any) -> list[int]:
        in_loop.append(threading.current_thread() is served._thread)
        return encode(self, text, *rest, **options)

    monkeypatch.setattr(Tokenizer, "encode", watched)
    for prompt in ("ab", BAD, "ab", BAD):
        served.complete(prompt=prompt)
    assert in_loop == [True, True, False, False]
