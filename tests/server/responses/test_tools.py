"""Custom tools, namespaces, and tools that a server would have to run."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import openai
import pytest

from tests.server.conftest import Served
from tests.server.in_process import IM_END, InProcessEngine, byte_tokenizer
from tests.server.openai.test_client import options
from tests.server.writing_engine import writing_engine

PATCH = """start: begin line+ end
begin: "*** Begin" LF
line: ("+" | "-") /[a-z"\\\\]*/ LF
end: "*** End" LF?
%import common.LF
"""
LARK = {"type": "grammar", "syntax": "lark", "definition": PATCH}
REGEX = {"type": "grammar", "syntax": "regex", "definition": r"[a-z]{2,4}=\d+"}
CUSTOM: dict[str, Any] = {"type": "custom", "name": "patch", "description": "Edit files.", "format": LARK}
FUNCTION = {"type": "function", "name": "add", "parameters": {"type": "object", "properties": {}}, "strict": None}
NAMESPACE = {"type": "namespace", "name": "agents", "description": "", "tools": [{**FUNCTION, "name": "close"}, CUSTOM]}
EVENTS = ["output_item.added", "custom_tool_call_input.delta", "custom_tool_call_input.done", "output_item.done"]
IS_PATCH = re.compile(r'\*\*\* Begin\r?\n([+-][a-z"\\]*\r?\n)+\*\*\* End(\r?\n)?')

Start = Callable[..., Served]


def writing(text: str) -> InProcessEngine:
    return InProcessEngine(lambda request: [*text.encode(), IM_END], max_model_len=1 << 12)


def forced(serve_app: Start) -> Served:
    """A server whose model writes anything that a grammar allows."""
    tokenizer = byte_tokenizer()
    engine = writing_engine(tokenizer)
    engine.max_model_len = 1 << 12
    return serve_app(engine, tokenizer=tokenizer)


def call(name: str, arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def post(served: Served, **body: Any) -> Any:
    answer = served.client.post("/v1/responses", json={"input": "Hi", "max_output_tokens": 200, **body})
    assert answer.status_code == 200, answer.text
    return answer


def events(served: Served, **body: Any) -> list[Any]:
    lines = post(served, stream=True, **body).text.splitlines()
    return [json.loads(line[6:]) for line in lines if line.startswith("data: ")]


@pytest.mark.parametrize("arguments", [{"input": 'a "b"\n'}, {"input": ""}, {}])
def test_a_call_of_a_custom_tool_is_text(serve_app: Start, arguments: dict[str, str]) -> None:
    served = serve_app(writing(call("patch", arguments)))
    api = openai.OpenAI(**options(served))
    answer = api.responses.create(model="test", input="Hi", tools=[CUSTOM, FUNCTION], max_output_tokens=200)  # type: ignore[list-item]
    (item,) = answer.output
    assert item.type == "custom_tool_call"
    assert (item.name, item.input) == ("patch", arguments.get("input", ""))
    shown = events(served, tools=[CUSTOM, FUNCTION])
    kinds = [event["type"].removeprefix("response.") for event in shown[2:-1]]
    assert kinds == [kind for kind in EVENTS if item.input or not kind.endswith("delta")]
    assert shown[-3]["input"] == item.input
    assert shown[2]["item"]["input"] == ""
    assert shown[-1]["response"]["output"][0]["input"] == item.input
    result = {"type": "custom_tool_call_output", "call_id": item.call_id, "output": "Done."}
    post(served, input=[result], previous_response_id=answer.id, tools=[CUSTOM])
    prompt = byte_tokenizer().decode(served.engine.requests[-1].prompt_tokens, False)
    assert call("patch", {"input": item.input}) in prompt
    assert "Done." in prompt


def test_a_custom_tool_that_must_be_called_writes_what_its_grammar_allows(serve_app: Start) -> None:
    served = forced(serve_app)
    named = {"type": "custom", "name": "patch"}
    for tools, choice in (([CUSTOM, FUNCTION], named), ([CUSTOM], "required")):
        (item,) = post(served, tools=tools, tool_choice=choice, max_output_tokens=400).json()["output"]
        assert item["type"] == "custom_tool_call"
        if item["status"] == "completed":
            assert IS_PATCH.fullmatch(item["input"])
    only = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "custom", "name": "set"}]}
    setter = {"type": "custom", "name": "set", "format": REGEX}
    for tools, choice in (([CUSTOM, setter], only), ([setter, CUSTOM], {"type": "custom", "name": "set"})):
        (item,) = post(served, tools=tools, tool_choice=choice).json()["output"]
        assert re.fullmatch(REGEX["definition"], item["input"])
    answer = post(served, tools=[FUNCTION, setter, CUSTOM], tool_choice="required", max_output_tokens=400)
    assert answer.headers["x-octavo-unknown-fields"] == "tools[2].format"
    asked = events(served, tools=[CUSTOM], tool_choice=named, max_output_tokens=400)
    assert [event["type"].removeprefix("response.") for event in asked[2:-1]] == EVENTS
    free = {"type": "custom", "name": "patch", "format": {"type": "text"}}
    (item,) = post(served, tools=[free], tool_choice="required", max_output_tokens=400).json()["output"]
    assert item["type"] == "custom_tool_call"


def test_a_custom_tool_of_chat_completions(serve_app: Start) -> None:
    tool = {"type": "custom", "custom": {"name": "patch", "format": {"type": "grammar", "grammar": {**LARK}}}}
    served = serve_app(writing(call("patch", {"input": "x"})))
    message = served.chat(tools=[tool], max_tokens=200).json()["choices"][0]["message"]
    (made,) = message["tool_calls"]
    assert (made["type"], made["custom"]) == ("custom", {"name": "patch", "input": "x"})
    chunks = served.chat(tools=[tool], max_tokens=200, stream=True).text.splitlines()
    found = [json.loads(line[6:])["choices"][0] for line in chunks if line.startswith("data: {")]
    calls = [each for choice in found for each in choice["delta"].get("tool_calls", ())]
    assert [each["custom"].get("input") for each in calls] == ["", "x"]
    choice = {"type": "custom", "custom": {"name": "patch"}}
    answer = forced(serve_app).chat(tools=[tool], tool_choice=choice, max_tokens=400).json()["choices"][0]
    written = answer["message"]["tool_calls"][0]["custom"]["input"]
    assert answer["finish_reason"] == "length" or IS_PATCH.fullmatch(written)


def test_tools_of_a_namespace(serve_app: Start) -> None:
    served = serve_app(writing(call("agents__close", {"id": 1}) + "\n" + call("agents__patch", {"input": "x"})))
    answer = post(served, tools=[FUNCTION, NAMESPACE], parallel_tool_calls=True).json()
    closed, patched = answer["output"]
    assert (closed["type"], closed["namespace"], closed["name"]) == ("function_call", "agents", "close")
    assert (patched["type"], patched["namespace"], patched["name"]) == ("custom_tool_call", "agents", "patch")
    post(served, input=[*answer["output"], {"role": "user", "content": "And?"}], tools=[FUNCTION, NAMESPACE])
    prompt = byte_tokenizer().decode(served.engine.requests[-1].prompt_tokens, False)
    assert call("agents__close", {"id": 1}) in prompt


def test_tools_that_items_add(serve_app: Start) -> None:
    served = serve_app(writing(call("agents__patch", {"input": "x"})))
    added: Any = {"type": "additional_tools", "role": "developer", "tools": [NAMESPACE, FUNCTION]}
    answer = post(served, input=[added, {"role": "user", "content": "Hi"}], tools=[FUNCTION])
    assert "x-octavo-unknown-fields" not in answer.headers
    (item,) = answer.json()["output"]
    assert (item["type"], item["namespace"], item["name"], item["input"]) == (
        "custom_tool_call",
        "agents",
        "patch",
        "x",
    )
    again = post(served, input=[added, {"role": "user", "content": "Hi"}], previous_response_id=answer.json()["id"])
    assert again.json()["output"][0]["name"] == "patch"


def test_tools_that_a_server_runs_are_skipped(serve_app: Start) -> None:
    served = serve_app(writing("Yes"))
    types = (
        "web_search",
        "file_search",
        "code_interpreter",
        "computer_use_preview",
        "image_generation",
        "mcp",
        "shell",
    )
    skipped = [{"type": kind} for kind in (*types, "local_shell", "apply_patch", "tool_search")]
    answer = post(served, tools=[*skipped, FUNCTION])
    names = answer.headers["x-octavo-unknown-fields"].split(", ")
    assert names == [f"tools.{tool['type']}" for tool in skipped]
    assert answer.json()["tools"][-1]["name"] == "add"
    assert post(served, tools=skipped, tool_choice="auto").json()["output"]
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "web_search"}]}
    assert post(served, tools=[*skipped, FUNCTION], tool_choice=allowed).json()["output"]
