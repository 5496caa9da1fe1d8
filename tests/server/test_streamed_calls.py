"""Arguments of calls come while they are written, on every API, and are what an unstreamed answer has."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.server.conftest import Served
from tests.server.in_process import IM_END, InProcessEngine, byte_tokenizer

TEMPLATE = (
    "{{ tools }}{# <tool_call> <function=name> <parameter=key> #}"
    "{% for m in messages %}{{ m.role }}:{{ m.content }}{% endfor %}"
)
PARAMETERS = {"type": "object", "properties": {"path": {"type": "string"}, "lines": {"type": "integer"}}}
PATH = 'caf\u00e9 "1"\n</parameter> \\ {x}'
ARGUMENTS = {"path": PATH, "lines": 12}
CALL = (
    f"<tool_call>\n<function=write>\n<parameter=path>\n{PATH}\n</parameter>\n<parameter=lines>\n12\n</parameter>\n"
    "</function>\n</tool_call>"
)
MESSAGES = [{"role": "user", "content": "Hi"}]
CUT = CALL.index("{x}")


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    served = Served(InProcessEngine(lambda request: [*CALL.encode(), IM_END]), byte_tokenizer(TEMPLATE), {})
    yield served
    served.stop()


def events(served: Served, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    text = served.client.post(path, json={**body, "stream": True}).text
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: {")]
    return [json.loads(line) for line in lines]


def chat(served: Served, max_tokens: int) -> tuple[Any, list[str]]:
    tools = [{"type": "function", "function": {"name": "write", "parameters": PARAMETERS}}]
    body = {"model": "test", "messages": MESSAGES, "tools": tools, "max_tokens": max_tokens}
    whole = served.client.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["tool_calls"]
    (function,) = [call["function"] for call in whole]
    deltas = [event["choices"][0]["delta"] for event in events(served, "/v1/chat/completions", body)]
    parts = [part["function"] for delta in deltas for part in delta.get("tool_calls", [])]
    assert [part["name"] for part in parts if "name" in part] == ["write"]
    return function["arguments"], [part["arguments"] for part in parts]


def messages(served: Served, max_tokens: int) -> tuple[Any, list[str]]:
    tools = [{"name": "write", "input_schema": PARAMETERS}]
    body = {"model": "test", "messages": MESSAGES, "tools": tools, "max_tokens": max_tokens}
    (block,) = served.client.post("/v1/messages", json=body).json()["content"]
    found = events(served, "/v1/messages", body)
    starts = [event["content_block"] for event in found if event["type"] == "content_block_start"]
    assert [start["name"] for start in starts] == ["write"]
    assert [event["type"] for event in found].count("content_block_stop") == 1
    return block["input"], [event["delta"]["partial_json"] for event in found if event["type"] == "content_block_delta"]


def responses(served: Served, max_tokens: int) -> tuple[Any, list[str]]:
    tools = [{"type": "function", "name": "write", "parameters": PARAMETERS}]
    body = {"model": "test", "input": "Hi", "tools": tools, "max_output_tokens": max_tokens}
    (item,) = served.client.post("/v1/responses", json=body).json()["output"]
    found = events(served, "/v1/responses", body)
    deltas = [event["delta"] for event in found if event["type"] == "response.function_call_arguments.delta"]
    (done,) = [event for event in found if event["type"] == "response.function_call_arguments.done"]
    assert done["arguments"] == "".join(deltas) == item["arguments"]
    (added,) = [event["item"] for event in found if event["type"] == "response.output_item.added"]
    assert (added["name"], added["arguments"]) == ("write", "")
    (last,) = found[-1]["response"]["output"]
    assert (last["arguments"], last["status"]) == (item["arguments"], item["status"])
    return item["arguments"], deltas


@pytest.mark.parametrize("ask", [chat, messages, responses])
def test_arguments_come_while_they_are_written(served: Served, ask: Any) -> None:
    whole, parts = ask(served, 200)
    assert json.loads("".join(parts)) == ARGUMENTS
    assert (whole if isinstance(whole, dict) else json.loads(whole)) == ARGUMENTS
    assert len([part for part in parts if part]) > 15


@pytest.mark.parametrize("ask", [chat, messages, responses])
def test_arguments_that_are_cut_are_a_beginning(served: Served, ask: Any) -> None:
    whole, parts = ask(served, len(CALL[:CUT].encode()))
    assert json.dumps(ARGUMENTS, ensure_ascii=False).startswith("".join(parts))
    assert len("".join(parts)) > 20
    assert whole == ({} if isinstance(whole, dict) else "".join(parts))


def test_the_api_of_ollama_has_whole_calls(served: Served) -> None:
    tools = [{"type": "function", "function": {"name": "write", "parameters": PARAMETERS}}]
    body = {"model": "test", "messages": MESSAGES, "tools": tools, "options": {"num_predict": 200}}
    lines = [json.loads(line) for line in served.client.post("/api/chat", json=body).text.splitlines()]
    calls = [call["function"] for line in lines for call in line["message"].get("tool_calls", [])]
    assert calls == [{"name": "write", "arguments": ARGUMENTS}]


BROKEN = '{"a": 1, "b": tru e, "c": "\\ud800"}'


@pytest.mark.parametrize(
    ("arguments", "members"),
    [
        (BROKEN, {"a": 1}),
        ('{"a": "\\ud800", "b": "\\ud83d\\ude00", "c": "\\\\ud800"}', {"a": "?", "b": "\U0001f600", "c": "\\ud800"}),
        ('{"a": 9007199254740993}', {"a": 9007199254740993}),
        ('{"a": [' + "[" * 50_000, {}),
    ],
)
def test_arguments_that_are_no_json_are_an_object_all_the_same(
    serve_app: Any, arguments: str, members: dict[str, Any]
) -> None:
    text = f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>'
    template = TEMPLATE.replace("<function=name> <parameter=key>", "arguments")
    tokens = [*text.encode()[:400], IM_END]
    served = serve_app(InProcessEngine(lambda request: tokens), tokenizer=byte_tokenizer(template))
    body = {"model": "test", "messages": MESSAGES, "tools": [{"name": "f", "input_schema": {}}], "max_tokens": 400}
    answer = served.client.post("/v1/messages", json=body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["content"][-1]["input"] == members
