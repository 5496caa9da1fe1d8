"""Bodies are read strictly: every bad value is a 400 that names its field, and sizes are bounded while reading."""

from __future__ import annotations

import json
import socket
from typing import Any

import httpx
import pytest

from octavo_server.dialects.openai import chat_body, completions, tokenize
from octavo_server.http.request_body import BodyDecoder
from tests.server.conftest import Served
from tests.tiers import nightly_after

JSON = {"Content-Type": "application/json"}

INTEGERS = ("max_tokens", "n", "top_k", "min_tokens", "logprobs", "prompt_logprobs", "priority", "best_of")
CHAT_INTEGERS = ("max_tokens", "max_completion_tokens", "n", "top_k", "min_tokens", "top_logprobs", "priority")
FLOATS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
NEVER_NUMBERS = ("NaN", "Infinity", "-Infinity", "1e999", "true", '"1"', "[]", "{}", "1" + "0" * 5000)


def post(served: Served, path: str, raw: str) -> httpx.Response:
    return served.client.post(path, content=raw.encode(), headers=JSON)


def bodies(path: str, name: str, value: str) -> str:
    prompt = '"prompt":"x"' if path == "/v1/completions" else '"messages":[{"role":"user","content":"x"}]'
    return f'{{{prompt},"{name}":{value}}}'


def assert_refused(response: httpx.Response, name: str) -> None:
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert isinstance(error["code"], str)
    assert error["param"] == name
    assert len(response.content) < 1000


@pytest.mark.parametrize("value", [*NEVER_NUMBERS, "-1", "9223372036854775808", "1.5"])
@pytest.mark.parametrize(
    ("path", "name"),
    [("/v1/completions", name) for name in INTEGERS] + [("/v1/chat/completions", name) for name in CHAT_INTEGERS],
)
def test_bad_integers(served: Served, path: str, name: str, value: str) -> None:
    if value == "-1" and name in ("top_k", "max_tokens", "max_completion_tokens"):  # all tokens, as many as fit
        assert post(served, path, bodies(path, name, value)).status_code == 200
        return
    assert_refused(post(served, path, bodies(path, name, value)), name)


@pytest.mark.parametrize("value", [*NEVER_NUMBERS, "-3", "9223372036854775808", "1e300"])
@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_bad_floats(served: Served, path: str, name: str, value: str) -> None:
    assert_refused(post(served, path, bodies(path, name, value)), name)


@pytest.mark.parametrize("value", NEVER_NUMBERS)
def test_bad_seeds(served: Served, value: str) -> None:
    assert_refused(post(served, "/v1/completions", bodies("/v1/completions", "seed", value)), "seed")


@pytest.mark.parametrize("value", ["-1", "9223372036854775808", "-99999999999999999999999", "18446744073709551615"])
def test_any_whole_number_is_a_seed(served: Served, value: str) -> None:
    assert post(served, "/v1/completions", bodies("/v1/completions", "seed", value)).status_code == 200


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("stream", "1"),
        ("stream", '"true"'),
        ("echo", "0"),
        ("ignore_eos", "[]"),
        ("stop", "3"),
        ("stop", "[1]"),
        ("stop", '[""]'),
        ("stop", '["' + "x" * 300 + '"]'),
        ("stop_token_ids", "[true]"),
        ("stop_token_ids", "[-1]"),
        ("stop_token_ids", "[300]"),
        ("stop_token_ids", "[9223372036854775808]"),
        ("logit_bias", "[]"),
        ("logit_bias", '{"5":true}'),
        ("logit_bias", '{"5":1e999}'),
        ("logit_bias", '{"5":101}'),
        ("logit_bias", '{"-1":1}'),
        ("logit_bias", '{"x":1}'),
        ("logit_bias", '{"300":1}'),
        ("logit_bias", '{"99999999999999999999":1}'),
        ("stream_options", "[]"),
        ("stream_options", '{"include_usage":1}'),
        ("cache_salt", '"' + "x" * 257 + '"'),
        ("model", "5"),
        ("prompt", '"\\ud800"'),
        ("prompt", "[[1.5]]"),
        ("prompt", "[300]"),
        ("prompt", "[-1]"),
        ("prompt", "[9223372036854775808]"),
        ("prompt", "[true]"),
        ("prompt", '["x",1]'),
        ("prompt", '""'),
        ("prompt", "[]"),
        ("prompt", "[[]]"),
        ("prompt", '["x",""]'),
        ("prompt", "{}"),
        ("prompt", "[[[1]]]"),
        ("prompt", "null"),
    ],
)
def test_other_bad_values(served: Served, name: str, value: str) -> None:
    raw = f'{{"prompt":{value}}}' if name == "prompt" else bodies("/v1/completions", name, value)
    assert_refused(post(served, "/v1/completions", raw), name)


def test_null_means_default_everywhere(served: Served) -> None:
    names = [
        *INTEGERS,
        *FLOATS,
        "seed",
        "stop",
        "logit_bias",
        "stream",
        "stream_options",
        "echo",
        "user",
        "suffix",
        "x",
    ]
    response = served.complete(**dict.fromkeys(names))
    assert response.status_code == 200
    assert response.json()["usage"]["completion_tokens"] == 16


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"[1]",
        b'"x"',
        b"null",
        b"{",
        b'{"prompt":"x"} x',
        b'{"prompt":"\xff"}',
        b'{"\xff":"x"}',
        b"\xef\xbb\xbf",
        b'\xef\xbb\xbf\xef\xbb\xbf{"prompt":"x"}',
        b"[" * 100_000,
        b'{"prompt":' + b"[" * 100_000,
        b'{"x":' + b"[" * 200 + b"]" * 200 + b"}",
        b'{"x":' + b'{"a":' * 200 + b"1" + b"}" * 201,
        b'{"prompt":01}',
    ],
)
def test_what_is_no_json_object(served: Served, raw: bytes) -> None:
    response = served.client.post("/v1/completions", content=raw, headers=JSON)
    assert response.status_code == 400
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize("media_type", ["text/plain", "application/x-www-form-urlencoded", None])
def test_only_json_is_read(served: Served, media_type: str | None) -> None:
    headers = {} if media_type is None else {"Content-Type": media_type}
    response = served.client.post("/v1/completions", content=b'{"prompt":"x"}', headers=headers)
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "unsupported_media_type"


def test_a_declared_size_above_the_limit_is_refused_unread(serve_app: Any) -> None:
    served = serve_app(max_request_bytes=2048)
    assert served.complete(prompt="x" * 1000, max_tokens=1).status_code != 413
    response = served.complete(prompt="x" * 3000)
    assert response.status_code == 413
    assert response.json()["error"]["code"] == "request_too_large"


def test_a_body_without_end_is_refused_once_it_passes_the_limit(serve_app: Any) -> None:
    served = serve_app(max_request_bytes=4096)
    with socket.create_connection(("127.0.0.1", served.port), timeout=30) as client:
        client.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n"
        )
        with pytest.raises(OSError):
            client.sendall((b"10000\r\n" + b" " * 65536 + b"\r\n") * 1024)


def test_a_413_reaches_a_client_that_stops_to_read_it(serve_app: Any) -> None:
    served = serve_app(max_request_bytes=4096)
    with socket.create_connection(("127.0.0.1", served.port), timeout=30) as client:
        client.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n1001\r\n" + b" " * 4097 + b"\r\n"
        )
        assert client.recv(4096).startswith(b"HTTP/1.1 413 ")


ODD_VALUES = (
    *(None, True, False, 0, 1, -1, 2**31, 2**63, -(2**63), 2**64, 10**400, 0.5, -0.0, 1e308, 5e-324),
    *("", "1", "x" * 1000, "\0", "\u2028", "😀", "{{ 1 }}", "../../etc/passwd"),
    *([], [[]], [None], [0], [1e9], ["x"], [{}], {}, {"": None}, {"type": "text"}, {"0": 1}, {"role": "user"}),
)


@pytest.mark.slow
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"])
@pytest.mark.parametrize("step", nightly_after(1, (6, 1)))
def test_no_value_of_any_field_is_a_server_error(served: Served, path: str, step: int) -> None:
    """Every value, in one of ``step`` fields."""
    readers: dict[str, BodyDecoder[Any]] = {
        "/v1/completions": completions.decoder,
        "/v1/chat/completions": chat_body.decoder,
        "/tokenize": tokenize.tokenize_decoder,
        "/detokenize": tokenize.detokenize_decoder,
    }
    fine = {"prompt": "x"}
    if path == "/v1/chat/completions":
        fine = {"messages": [{"role": "user", "content": "x"}]}  # type: ignore[dict-item]
    decoder = readers[path]
    seen = set()
    for number, name in enumerate((*decoder.decoders, *decoder.refused, *decoder.accepted, "unheard-of")):
        for value in ODD_VALUES[number % step :: step]:
            response = served.client.post(path, json={**fine, "max_tokens": 2, name: value})
            seen.add(response.status_code)
            is_late = name == "timeout" and response.status_code == 504
            assert response.status_code < 500 or is_late, (name, value, response.text)
            if response.status_code == 400:
                error = response.json()["error"]
                assert error["param"] in (name, "prompt", "messages", "tokens", "max_tokens", "min_tokens"), (
                    name,
                    value,
                )
    assert 400 in seen
    assert served.engine.num_live == 0


@pytest.mark.parametrize(
    ("body", "name"),
    [
        (b'{"prompt": "a", "prompt": "a"}', "prompt"),
        (b'{"prompt": "a: {", "max_tokens": 1, "max_tokens": 2}', "max_tokens"),
        (b'{"prompt": "a", "\\u0070rompt": "b"}', "prompt"),
        (b'{"prompt": "a", "logit_bias": {"1": 1, "1": 2}}', "1"),
        (b'{"prompt": "a", "unknown": [1, [{"x": [{"y": 1, "y": 1}]}]]}', "y"),
        (b'{"prompt": "a", "unknown": 1, "unknown": 2}', "unknown"),
        (b'{"prompt": "\\"a\\\\", "" : 1, "": {}}', ""),
        (b'{"prompt": "a", "response_format": {"type": "text", "type": "json_object"}}', "type"),
        (b'{"prompt": "a", "prompt": "' + b"x: " * 100_000 + b'"}', "prompt"),
    ],
)
def test_a_name_comes_once_in_an_object(served: Served, body: bytes, name: str) -> None:
    """Which of two values counts is not the same for every decoder, such as one of a filter before the server."""
    answer = served.client.post("/v1/completions", content=body, headers={"content-type": "application/json"})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, "invalid_value"), error
    assert error["param"] == name
    assert f"'{name}' twice" in error["message"]


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": '"a": "b", \\ {"c": 1, "c": 2}', "max_tokens": 1},
        {"prompt": "a" * 100_000 + ':"', "max_tokens": 1, "unknown": {"a": {"a": {"a": [{"a": 1}, {"a": 1}]}}}},
        {"prompt": [1, 2, 3], "max_tokens": 1, "metadata": {"k": "a:b", "l": 'x"y":1'}},
    ],
)
def test_names_may_come_again_in_other_objects_and_in_texts(body: dict[str, Any]) -> None:
    completions.decoder.read(json.dumps(body).encode(), 512)
