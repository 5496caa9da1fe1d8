"""``bad_words`` and ``allowed_token_ids``: what the engine is told, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from octavo.sampling_params import MAX_BAD_WORDS
from tests.server.conftest import Served
from tests.server.in_process import EOS, IM_END

CAT = tuple(b"cat")


@pytest.mark.parametrize("stream", [False, True])
def test_the_engine_gets_the_tokens_of_bad_words(serve_app: Any, stream: bool) -> None:
    served = serve_app()
    asked = {"bad_words": ["cat", " x"], "allowed_token_ids": [97, 98], "n": 2, "stream": stream}
    assert served.complete(**asked).status_code == 200
    assert served.chat(**asked).status_code == 200
    assert len(served.engine.requests) == 4
    for request in served.engine.requests:
        assert request.banned_sequences == (CAT, (32, *CAT), (120,), (32, 120))
        assert request.params.allowed_token_ids == (97, 98)


def test_nothing_asked_is_nothing_banned(serve_app: Any) -> None:
    served = serve_app()
    served.complete(bad_words=[], allowed_token_ids=None)
    served.chat()
    assert all(request.banned_sequences == () for request in served.engine.requests)
    assert all(request.params.allowed_token_ids is None for request in served.engine.requests)


def test_a_batch_takes_them_too(serve_app: Any) -> None:
    served = serve_app()
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x", "bad_words": ["cat"]}}
    upload = {"file": ("in.jsonl", json.dumps(line).encode())}
    file = served.client.post("/v1/files", files=upload, data={"purpose": "batch"}).json()
    asked = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
    batch = served.client.post("/v1/batches", json=asked).json()
    while served.client.get(f"/v1/batches/{batch['id']}").json()["status"] != "completed":
        pass
    assert served.engine.requests[0].banned_sequences == (CAT, (32, *CAT))


@pytest.mark.parametrize(
    ("body", "field", "words"),
    [
        ({"bad_words": ["x"] * (MAX_BAD_WORDS + 1)}, "bad_words", f"at most {MAX_BAD_WORDS}"),
        ({"bad_words": ["x" * 257]}, "bad_words", "1 to 256 bytes"),
        ({"bad_words": [" "]}, "bad_words", "not all of them spaces"),
        ({"bad_words": "x"}, "bad_words", "array"),
        ({"bad_words": [1]}, "bad_words", "str"),
        ({"allowed_token_ids": []}, "allowed_token_ids", "1 to 4096"),
        ({"allowed_token_ids": [1] * 4097}, "allowed_token_ids", "1 to 4096"),
        ({"allowed_token_ids": [300]}, "allowed_token_ids", "0 to 299"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids", "-1 is not a token id"),
        ({"allowed_token_ids": [2**64]}, "allowed_token_ids", ""),
        ({"allowed_token_ids": [97], "bad_words": ["a"]}, "allowed_token_ids", "'bad_words' or 'min_tokens'"),
        ({"allowed_token_ids": [EOS, IM_END], "min_tokens": 1}, "allowed_token_ids", "'min_tokens'"),
    ],
)
def test_what_cannot_be_is_refused_by_name(served: Served, body: dict[str, Any], field: str, words: str) -> None:
    for response in (served.complete(**body), served.chat(**body)):
        error = response.json()["error"]
        assert response.status_code == 400, response.text
        assert (error["param"], error["code"]) == (field, "invalid_value")
        assert words in error["message"]
    assert served.engine.num_live == 0


def test_without_a_tokenizer_there_are_no_words(serve_app: Any) -> None:
    served = serve_app(tokenizer=None)
    assert served.complete(prompt=[1], bad_words=["x"]).json()["error"]["param"] == "bad_words"
    assert served.complete(prompt=[1], allowed_token_ids=[5]).status_code == 200
