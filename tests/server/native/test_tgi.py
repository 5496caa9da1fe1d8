"""Text Generation Inference's API: Hugging Face's unmodified client, events, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from huggingface_hub import InferenceClient

from tests.server.conftest import Served
from tests.server.in_process import ANSWER


@pytest.fixture(scope="module")
def client(server: Served) -> InferenceClient:
    return InferenceClient(model=server.url)


def post(served: Served, path: str = "/", **parameters: Any) -> Any:
    return served.client.post(path, json={"inputs": "Hi", "parameters": parameters})


def test_a_text_and_its_stream(server: Served, client: InferenceClient) -> None:
    assert client.text_generation("Hi", max_new_tokens=10) == ANSWER[:10]
    assert server.engine.requests[-1].params.temperature == 0
    parts = list(client.text_generation("Hi", max_new_tokens=10, stream=True))
    assert "".join(parts) == ANSWER[:10]
    full = client.text_generation("Hi", max_new_tokens=4, return_full_text=True)
    assert full == "Hi" + ANSWER[:4]


def test_chats_need_no_name_of_the_model(server: Served, client: InferenceClient) -> None:
    """huggingface_hub calls it "dummy" when it knows only a URL, text-generation and TGI's documentation "tgi"."""
    question = [{"role": "user", "content": "Hi"}]
    answer = client.chat_completion(question, max_tokens=5)
    assert (answer.choices[0].message.content, answer.model) == (ANSWER[:5], "test")
    parts = client.chat_completion(question, max_tokens=5, stream=True)
    assert "".join(part.choices[0].delta.content or "" for part in parts if part.choices) == ANSWER[:5]
    assert server.chat(model="tgi").json()["model"] == "test"
    assert server.chat(model="tgi2").status_code == 404
    assert httpx.get(f"http://127.0.0.1:{server.port}/v1/models/tgi").status_code == 404


def test_a_chat_names_a_function_without_a_type(server: Served, client: InferenceClient) -> None:
    tools: Any = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    for choice in ({"function": {"name": "f"}}, {"type": "function", "function": {"name": "f"}}):
        client.chat_completion([{"role": "user", "content": "Hi"}], tools=tools, tool_choice=choice, max_tokens=1)
    named, same = server.engine.requests[-2:]
    assert named.params.grammar == same.params.grammar is not None


@pytest.mark.parametrize(
    ("kind", "value", "wrong"),
    [("json", {"type": "object"}, 5), ("json", '{"type": "object"}', "{"), ("regex", "a+", None)],
)
def test_chats_take_the_forms_of_tgi(server: Served, kind: str, value: Any, wrong: Any) -> None:
    assert server.chat(response_format={"type": kind, "value": value}).status_code == 200
    given = server.engine.requests[-1].params.grammar
    server.chat(**{f"guided_{kind}": value})
    assert given == server.engine.requests[-1].params.grammar is not None
    error = server.chat(response_format={"type": kind, "value": wrong}).json()["error"]
    assert error["message"].startswith("'response_format.value' must be ")


def test_the_server_describes_itself(server: Served) -> None:
    info = server.client.get("/info").json()
    assert info["model_id"] == server.app.state.services.first.model_name
    assert info["max_input_tokens"] + 1 == info["max_total_tokens"] == server.engine.info.max_model_len


def test_details(client: InferenceClient) -> None:
    answer = client.text_generation("Hi", max_new_tokens=30, details=True, stop=["answer"], seed=7)
    assert (answer.details.finish_reason, answer.details.seed) == ("stop_sequence", 7)
    assert answer.details.generated_tokens == len(answer.details.tokens) == len("The answer")
    assert "".join(token.text for token in answer.details.tokens) == answer.generated_text == "The answer"
    unstopped = client.text_generation("Hi", max_new_tokens=6, details=True)
    assert [token.text for token in unstopped.details.tokens] == list("The an")
    parts = list(client.text_generation("Hi", max_new_tokens=3, details=True, stream=True))
    assert [part.index for part in parts] == [1, 2, 3]
    assert parts[-1].generated_text == ANSWER[:3]
    assert parts[-1].details.finish_reason == "length"


def test_sampling_starts_with_any_of_its_parameters(server: Served) -> None:
    post(server, max_new_tokens=1, temperature=0.5, top_k=3, repetition_penalty=1.2)
    params = server.engine.requests[-1].params
    assert (params.temperature, params.top_k, params.repetition_penalty) == (0.5, 3, 1.2)
    post(server, max_new_tokens=1, do_sample=True)
    assert server.engine.requests[-1].params.temperature == 1


def test_events(server: Served) -> None:
    answer = post(server, "/generate_stream", max_new_tokens=2)
    events = [json.loads(line.removeprefix("data:")) for line in answer.text.splitlines() if line]
    assert [event["token"]["id"] for event in events] == list(ANSWER[:2].encode())
    assert [event["generated_text"] for event in events] == [None, ANSWER[:2]]


@pytest.mark.parametrize(
    ("parameters", "named"),
    [
        ({"watermark": True}, "parameters.watermark"),
        ({"best_of": 2}, "parameters.best_of"),
        ({"truncate": 3}, "parameters.truncate"),
        ({"grammar": {"type": "ebnf", "value": "x"}}, "parameters.grammar"),
        ({"max_new_tokens": 10**6}, "tokens"),
        ({"temperature": "hot"}, "parameters.temperature"),
        ({"temperature": 101}, "parameters.temperature"),
        ({"max_new_tokens": 2**31}, "parameters.max_new_tokens"),
    ],
)
def test_what_is_refused(server: Served, parameters: dict[str, Any], named: str) -> None:
    answer = post(server, **parameters)
    assert answer.status_code == 422
    assert named in answer.json()["error"]
    assert answer.json()["error_type"] == "validation"
