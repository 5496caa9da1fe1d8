"""A request rendered to token ids, generated from them, and read again is the answer of the coupled endpoint."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from octavo.types import Request
from tests.server.conftest import Served
from tests.server.in_process import InProcessEngine
from tests.server.test_response import events

USER = {"role": "user", "content": "Weather in Rome?"}
TOOL = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
ANSWERS = {
    "plain": "It is warm there. \N{SNOWMAN}",
    "reasoning": "<think>Let me see.</think>\n\nIt is warm there.",
    "call": f"<think>Let me see.</think>\n\nI look. {CALL}",
}
SETTINGS = {
    "plain": {},
    "reasoning": {"reasoning_parser": "deepseek_r1"},
    "call": {"reasoning_parser": "deepseek_r1", "tool_call_parser": "hermes"},
}
ASKED: dict[str, dict[str, Any]] = {
    "plain": {"logprobs": True, "top_logprobs": 2, "n": 2},
    "reasoning": {"stop": ["there"]},
    "call": {"tools": [TOOL]},
}


@pytest.fixture(params=sorted(ANSWERS))
def kind(request: Any) -> str:
    return str(request.param)


@pytest.fixture
def answering(serve_app: Any, kind: str) -> Served:
    answer = ANSWERS[kind].encode()

    def tokens(request: Request) -> list[int]:
        return [*answer, 256]

    served: Served = serve_app(InProcessEngine(answer=tokens, max_model_len=2048), **SETTINGS[kind])
    return served


def post(served: Served, path: str, body: Any) -> Any:
    response = served.client.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


def without_ids(value: Any) -> Any:
    """Without what is new in each answer, and other tokens: of these the drawn one takes a place."""
    if isinstance(value, list):
        return [without_ids(each) for each in value]
    if not isinstance(value, dict):
        return value
    return {name: without_ids(each) for name, each in value.items() if name not in ("id", "created", "top_logprobs")}


def test_a_conversation_makes_the_round_trip(answering: Served, kind: str) -> None:
    asked = {"messages": [USER], "temperature": 0.0, **ASKED[kind]}
    coupled = post(answering, "/v1/chat/completions", asked)
    direct = answering.engine.requests[-1]
    rendered = post(answering, "/v1/chat/completions/render", asked)
    assert rendered["token_ids"] == direct.prompt_tokens
    generated = post(answering, "/inference/v1/generate", rendered)
    again = answering.engine.requests[-1]
    assert again.params == msgspec.structs.replace(direct.params, max_tokens=direct.max_tokens)
    assert again.max_tokens == direct.max_tokens
    body = {"generate_response": generated, "chat_request": asked, "prompt_tokens": len(rendered["token_ids"])}
    found = post(answering, "/v1/chat/completions/derender", body)
    assert found["id"] == generated["request_id"]
    assert found.pop("kv_transfer_params") is None
    details = coupled["usage"].pop("completion_tokens_details"), found["usage"].pop("completion_tokens_details")
    assert details[0]["reasoning_tokens"] == details[1]["reasoning_tokens"]
    assert without_ids(found) == without_ids(coupled)


def test_a_stream_makes_the_round_trip(answering: Served, kind: str) -> None:
    asked = {"messages": [USER], "temperature": 0.0, "stream": True, **ASKED[kind], "n": 1}
    asked["stream_options"] = {"include_usage": True}
    coupled = joined(events(answering.client.post("/v1/chat/completions", json=asked).content))
    rendered = post(answering, "/v1/chat/completions/render", asked)
    state, chunks = None, []
    for event in events(answering.client.post("/inference/v1/generate", json=rendered).content):
        body = {"generate_chunk": event, "chat_request": asked, "stream": True, "stream_state": state}
        answer = post(answering, "/v1/chat/completions/derender", body)
        state = answer["stream_state"]
        chunks.append(answer["chunk"])
    assert without_ids(joined(chunks)) == without_ids(coupled)
    assert {chunk["id"] for chunk in chunks} == {rendered["request_id"]}
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["prompt_tokens"] == len(rendered["token_ids"])


def joined(chunks: list[Any]) -> dict[str, Any]:
    """What the chunks of one choice say together."""
    result: dict[str, Any] = {"calls": {}, "logprobs": []}
    for chunk in chunks:
        for choice in chunk["choices"]:
            for name, value in choice["delta"].items():
                if name != "tool_calls":
                    result[name] = result.get(name, "") + value
                for call in value if name == "tool_calls" else []:
                    own = result["calls"].setdefault(call["index"], {"name": "", "arguments": ""})
                    own["name"] += call["function"].get("name", "")
                    own["arguments"] += call["function"].get("arguments", "")
            result["logprobs"] += (choice["logprobs"] or {}).get("content", [])
            result["end"] = choice["finish_reason"] or result.get("end")
    return result


def test_prompts_make_the_round_trip(served: Served) -> None:
    asked = {"prompt": ["ab", "cde"], "max_tokens": 6, "logprobs": 1, "temperature": 0.0, "n": 2}
    coupled = post(served, "/v1/completions", asked)
    rendered = post(served, "/v1/completions/render", asked)
    assert [each["token_ids"] for each in rendered] == [list(b"ab"), list(b"cde")]
    generated = [post(served, "/inference/v1/generate", each) for each in rendered]
    body: dict[str, Any] = {"generate_responses": generated, "completion_request": asked, "prompt_tokens": [2, 3]}
    found = post(served, "/v1/completions/derender", body)
    assert without_ids(found["choices"]) == without_ids(coupled["choices"])
    assert found["usage"]["prompt_tokens"] == 5
    asked |= {"prompt": "ab", "n": 1, "stream": True}
    coupled_chunks = events(served.client.post("/v1/completions", json=asked).content)
    (rendered_one,) = post(served, "/v1/completions/render", asked)
    state, chunks = None, []
    for event in events(served.client.post("/inference/v1/generate", json=rendered_one).content):
        body = {"generate_chunk": event, "completion_request": asked, "stream": True, "stream_state": state}
        answer = post(served, "/v1/completions/derender", body)
        state = answer["stream_state"]
        chunks.append(answer["chunk"])
    assert flat(chunks) == flat(coupled_chunks)


def flat(chunks: list[Any]) -> dict[str, Any]:
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    logprobs = [choice["logprobs"] for choice in choices if choice["logprobs"]]
    offsets = [offset for each in logprobs for offset in each["text_offset"]]
    return {"text": "".join(choice["text"] for choice in choices), "offsets": offsets}


def test_a_grammar_goes_with_the_token_ids(serve_app: Any) -> None:
    served = serve_app(InProcessEngine(answer=lambda request: [*b'{"a": 1}', 256]))
    for asked in (
        {"response_format": {"type": "json_object"}},
        {"tools": [TOOL], "tool_choice": "required"},
    ):
        body = {"messages": [USER], **asked}
        post(served, "/v1/chat/completions", body)
        direct = served.engine.requests[-1].params.grammar
        assert direct is not None
        rendered = post(served, "/v1/chat/completions/render", body)
        post(served, "/inference/v1/generate", rendered)
        assert json.loads(served.engine.requests[-1].params.grammar) == json.loads(direct)


def test_a_response_is_rendered(served: Served) -> None:
    asked = {"input": "Hi", "max_output_tokens": 5}
    post(served, "/v1/responses", asked)
    direct = served.engine.requests[-1]
    rendered = post(served, "/v1/responses/render", asked)
    assert rendered["token_ids"] == direct.prompt_tokens
    assert rendered["sampling_params"]["max_tokens"] == direct.max_tokens == 5
    response = served.client.post("/v1/responses/render", json={**asked, "previous_response_id": "resp_1"})
    assert "'previous_response_id' is not rendered" in response.json()["error"]["message"]


ANSWER = {"request_id": "r", "choices": [{"index": 0, "token_ids": [72, 105], "finish_reason": "stop"}]}


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({}, "generate_response"),
        ({"generate_response": {**ANSWER, "output_mode": "text"}}, "'output_mode' must be 'tokens'"),
        ({"generate_response": {"choices": [{"token_ids": [999]}]}}, "'token_ids' has 999"),
        ({"generate_response": {"choices": [{"token_ids": [72] * 600}]}}, "'token_ids' has 600"),
        ({"generate_response": {"choices": [{"index": -1}]}}, "'choices' must have at most"),
        (
            {"generate_response": {"choices": [{"token_ids": [72], "logprobs": {"content": [{"a": 1}]}}]}},
            "'logprobs.content' must have entries with",
        ),
        ({"generate_chunk": ANSWER, "stream": True, "stream_state": {"output_token_ids": [999]}}, "'stream_state'"),
        ({"generate_response": ANSWER, "chat_request": {"messages": []}}, "'messages'"),
        ({"generate_response": {**ANSWER, "usage": {"completion_tokens": None}}}, "'usage' must have whole numbers"),
        (
            {"generate_response": {"choices": [{"logprobs": {"content": [{"token_id": 1, "top_logprobs": 3}]}}]}},
            "'logprobs.content' must have entries with",
        ),
    ],
)
def test_what_is_no_answer_is_refused(served: Served, body: dict[str, Any], named: str) -> None:
    response = served.client.post("/v1/chat/completions/derender", json=body)
    assert response.status_code == 400, response.text
    assert named in response.json()["error"]["message"]


def test_tokens_that_were_aborted_are_read(served: Served) -> None:
    generated = {"choices": [{"token_ids": [72, 105], "finish_reason": "abort"}]}
    found = post(served, "/v1/chat/completions/derender", {"generate_response": generated})
    assert found["choices"][0]["message"]["content"] == "Hi"
    assert found["choices"][0]["finish_reason"] == "abort"


def test_only_a_request_says_what_of_a_text_is_reasoning(serve_app: Any) -> None:
    served = serve_app(reasoning_parser="deepseek_r1")
    response = served.client.post("/v1/chat/completions/derender", json={"generate_response": ANSWER})
    assert "'chat_request'" in response.json()["error"]["message"]
