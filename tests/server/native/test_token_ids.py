"""POST /inference/v1/generate: streams, texts, ends by name; and token ids in the answers of all APIs."""

from __future__ import annotations

import json
import threading
from typing import Any

import httpx
import pytest

from octavo.errors import Withdrawn
from octavo.text import tokenizer
from tests.server.conftest import Served
from tests.server.in_process import ANSWER, InProcessEngine
from tests.server.test_response import events

PROMPT = list(b"What is 2+2?")
PATH = "/inference/v1/generate"


def generate(served: Served, **body: Any) -> Any:
    response = served.client.post(PATH, json={"token_ids": PROMPT, **body})
    assert response.status_code == 200, response.text
    return response.json()


def test_a_stream_has_the_tokens_of_the_answer(served: Served) -> None:
    asked: dict[str, Any] = {"sampling_params": {"max_tokens": 5, "logprobs": 1, "n": 2}, "return_token_ids": True}
    whole = generate(served, **asked, request_id="r-1")
    assert whole["request_id"] == "r-1"
    assert whole["output_mode"] == "tokens"
    assert whole["prompt_token_ids"] == PROMPT
    body = {"token_ids": PROMPT, **asked, "stream": True, "stream_options": {"include_usage": True}}
    found = events(served.client.post(PATH, json=body).content)
    for index in range(2):
        parts = [part for event in found for part in event["choices"] if part["index"] == index]
        choice = whole["choices"][index]
        assert [token for part in parts for token in part["token_ids"]] == choice["token_ids"]
        entries = [entry for part in parts for entry in part["logprobs"]["content"]]
        assert entries == choice["logprobs"]["content"]
        assert [part["finish_reason"] for part in parts] == [None] * (len(parts) - 1) + ["length"]
        assert (
            parts[-1]["weight_versions"] == choice["weight_versions"] == [{"version": "default", "start": 0, "end": 5}]
        )
        assert all(part["weight_versions"] is None for part in parts[:-1])
    assert sum("prompt_token_ids" in event for event in found) == 2, "one for each choice"
    assert found[-1]["choices"] == []
    assert found[-1]["usage"] == whole["usage"]


def test_without_a_limit_the_context_is_filled(serve_app: Any) -> None:
    served = serve_app(InProcessEngine(max_model_len=40))
    assert len(generate(served)["choices"][0]["token_ids"]) == 40 - len(PROMPT)


def test_texts_are_shown_on_request(served: Served) -> None:
    params = {"max_tokens": 20, "stop": ["is"], "logprobs": 1}
    (choice,) = generate(served, output_mode="text", sampling_params=params)["choices"]
    assert choice["text"] == "The answer "
    assert choice["token_ids"] == list(b"The answer is"), "with those of the stop string"
    assert choice["logprobs"]["content"][0]["token"] == "T"
    assert choice["logprobs"]["content"][0]["bytes"] == list(b"T")
    body = {"token_ids": PROMPT, "output_mode": "text", "stream": True, "sampling_params": params}
    parts = [event["choices"][0] for event in events(served.client.post(PATH, json=body).content)]
    assert "".join(part["text"] for part in parts) == choice["text"]


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"output_mode": "derender"}, "'output_mode' must be one of tokens, text."),
        ({"request_id": "x" * 257}, "'request_id' must have 1 to 256 characters."),
        ({"features": {"mm_hashes": {}}}, "'features'"),
        ({"sampling_params": {"structured_outputs": {"octavo": "{}"}}}, "'structured_outputs.octavo' is not a grammar"),
        ({"stream": True, "sampling_params": {"prompt_logprobs": 1}}, "'prompt_logprobs' is not supported with"),
    ],
)
def test_what_cannot_be_is_refused(served: Served, body: dict[str, Any], named: str) -> None:
    response = served.client.post(PATH, json={"token_ids": PROMPT, **body})
    assert response.status_code == 400
    assert named in response.json()["error"]["message"]


def test_a_text_mode_needs_a_tokenizer(serve_app: Any) -> None:
    served = serve_app(tokenizer=None)
    response = served.client.post(PATH, json={"token_ids": PROMPT, "output_mode": "text"})
    assert response.status_code == 400
    assert "'output_mode'" in response.json()["error"]["message"]


def begun(served: Served, **body: Any) -> tuple[threading.Thread, list[httpx.Response]]:
    """A request that has three tokens and gets no others."""
    found: list[httpx.Response] = []

    def ask() -> None:
        found.append(served.client.post(PATH, json={"token_ids": PROMPT, "request_id": "mine", **body}))

    thread = threading.Thread(target=ask)
    thread.start()
    while not served.engine.live:
        threading.Event().wait(0.002)
    for _ in range(3):
        served.call(served.engine.step)
    return thread, found


@pytest.mark.parametrize("path", ["/inference/v1/abort_requests", "/abort_requests"])
def test_a_request_that_is_ended_by_its_id_has_its_tokens(serve_app: Any, tmp_path: Any, path: str) -> None:
    served = serve_app(InProcessEngine(runs=False), weight_updates_dir=str(tmp_path))
    thread, found = begun(served)
    assert served.client.post(path, json={"request_ids": ["another"]}).json()["aborted"] == 0
    assert served.client.post(path, json={"request_ids": []}).json()["aborted"] == 0
    if path == "/abort_requests":  # a body of no stated length
        assert (
            served.client.post(
                path, content=iter([b'{"rid": "another"}']), headers={"content-type": "application/json"}
            ).json()["aborted"]
            == 0
        )
    assert served.client.post(path, json={"request_ids": ["mine"]}).json()["aborted"] == 1
    thread.join(30)
    (choice,) = found[0].json()["choices"]
    assert (choice["finish_reason"], choice["token_ids"]) == ("abort", list(ANSWER.encode()[:3]))
    assert served.engine.aborted
    assert served.client.post(path, json={"request_ids": ["mine"]}).json()["aborted"] == 0


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_a_pause_ends_has_its_tokens(serve_app: Any, stream: bool) -> None:
    engine = InProcessEngine(runs=False)
    served = serve_app(engine)
    thread, found = begun(served, stream=stream, sampling_params={"n": 2})

    def withdraw() -> None:
        for live in list(engine.live.values()):
            live.listener.on_error(Withdrawn("paused"))

    served.call(withdraw)
    thread.join(30)
    parts = (
        [part for event in events(found[0].content) for part in event["choices"]]
        if stream
        else found[0].json()["choices"]
    )
    for index in range(2):
        tokens = [token for part in parts if part["index"] == index for token in part["token_ids"]]
        assert tokens == list(ANSWER.encode()[:3])
    assert sum(part["finish_reason"] == "abort" for part in parts) == 2


def test_a_thinking_budget_binds_token_ids(serve_app: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its marks are encoded for the first request alone."""
    served = serve_app(reasoning_parser="deepseek_r1")
    for number in (3, 4):
        generate(served, sampling_params={"thinking_token_budget": number})
        assert served.engine.requests[-1].thinking.num_tokens == number
        monkeypatch.setattr(tokenizer, "encode_texts", None)
    assert served.engine.requests[0].thinking.closes == served.engine.requests[1].thinking.closes


BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "ab", "max_tokens": 4}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 4}),
    ("/v1/messages", {"messages": [{"role": "user", "content": "a"}], "model": "test", "max_tokens": 4}),
    ("/v1/responses", {"input": "a", "max_output_tokens": 4}),
    ("/api/generate", {"prompt": "a", "model": "test", "options": {"num_predict": 4}}),
    ("/api/generate", {"prompt": "a", "model": "test", "raw": True, "options": {"num_predict": 4}}),
    ("/api/chat", {"messages": [{"role": "user", "content": "a"}], "model": "test", "options": {"num_predict": 4}}),
    ("/v1/generate", {"prompt": "ab", "max_new_tokens": 4}),
    ("/generate", {"prompt": "ab", "max_tokens": 4}),
]


def members(value: Any, name: str) -> list[Any]:
    """All values of members called ``name``, however deep."""
    if isinstance(value, list):
        return [found for each in value for found in members(each, name)]
    if not isinstance(value, dict):
        return []
    own = [value[name]] if name in value else []
    return own + [found for each in value.values() for found in members(each, name)]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body"), BODIES)
def test_every_answer_shows_token_ids_on_request(served: Served, path: str, body: dict[str, Any], stream: bool) -> None:
    if stream and path.endswith("/generate") and not path.startswith("/api"):
        return  # they have no streams
    response = served.client.post(path, json={**body, "stream": stream, "return_token_ids": True})
    assert "x-octavo-unknown-fields" not in response.headers or path.endswith("/generate")
    lines = [line.removeprefix("data: ") for line in response.text.split("\n") if line.startswith(("data: {", "{"))]
    found = [json.loads(line) for line in lines]
    assert members(found, "prompt_token_ids") == [served.engine.requests[-1].prompt_tokens]
    assert [token for tokens in members(found, "token_ids") for token in tokens] == list(ANSWER.encode()[:4])
    plain = served.client.post(path, json={**body, "stream": stream})
    assert "token_ids" not in plain.text
