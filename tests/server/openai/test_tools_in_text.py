"""Tools for a model whose chat template has no place for them: told in text, and calls are read in the form told."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.server.conftest import Served
from tests.server.in_process import IM_END, TEMPLATE, InProcessEngine, byte_tokenizer

TOOL = {"type": "function", "function": {"name": "f"}}
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
UNKNOWN_FORMAT = "{% for t in tools or [] %}<function={{ t.function.name }}>{% endfor %}"

Serve = Callable[..., Served]


@pytest.fixture
def serve(serve_app: Any) -> Serve:
    def start(text: str, template: str = TEMPLATE, **settings: Any) -> Served:
        engine = InProcessEngine(lambda request: [*text.encode(), IM_END])
        served: Served = serve_app(engine, tokenizer=byte_tokenizer(template), **settings)
        return served

    return start


def message_of(served: Served, **body: Any) -> dict[str, Any]:
    answer = served.chat(**{"tools": [TOOL], "max_tokens": 130, **body})
    assert answer.status_code == 200, answer.text
    message: dict[str, Any] = answer.json()["choices"][0]["message"]
    return message


def calls_of(message: dict[str, Any]) -> list[tuple[str, str]]:
    return [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", [])]


def prompt_of(served: Served) -> str:
    return bytes(token for token in served.engine.requests[-1].prompt_tokens if token < 256).decode()


def test_a_model_that_knows_no_tools_takes_them(serve: Serve) -> None:
    served = serve(f"I look.\n{CALL}")
    message = message_of(served)
    assert (message["content"], calls_of(message)) == ("I look.", [("f", '{"a": 1}')])
    prompt = prompt_of(served)
    assert prompt.startswith("system\nYou can call functions")
    assert json.dumps(TOOL) in prompt
    text = served.chat(tools=[TOOL], max_tokens=130, stream=True).text
    deltas = [json.loads(line[6:])["choices"][0]["delta"] for line in text.split("\n\n")[:-2]]
    assert "".join(delta.get("content") or "" for delta in deltas) == "I look."
    parts = [part["function"]["arguments"] for delta in deltas for part in delta.get("tool_calls", [])]
    assert "".join(parts) == '{"a": 1}'


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ('<tool_call>[{"name": "f", "arguments": {"a": 1}}]</tool_call>', [("f", '{"a": 1}')]),
        ("<tool_call>[]</tool_call>", []),
    ],
)
def test_calls_in_a_list(serve: Serve, text: str, calls: list[tuple[str, str]]) -> None:
    message = message_of(serve(text))
    assert calls_of(message) == calls
    assert not message["content"]


def test_there_is_one_call_unless_more_are_asked_for(serve: Serve) -> None:
    served = serve(f"{CALL}\n{CALL}")
    assert len(calls_of(message_of(served))) == 1
    assert len(calls_of(message_of(served, parallel_tool_calls=True))) == 2
    body = {"input": "Hi", "tools": [{"type": "function", "name": "f"}], "max_output_tokens": 130}
    answer = served.client.post("/v1/responses", json=body).json()
    assert [item["type"] for item in answer["output"]] == ["function_call"]
    assert answer["parallel_tool_calls"] is False


def test_a_template_that_refuses_a_system_message(serve: Serve) -> None:
    served = serve(CALL, NO_SYSTEM + TEMPLATE)
    assert calls_of(message_of(served)) == [("f", '{"a": 1}')]
    assert prompt_of(served).startswith("user\nYou can call functions")
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    assert calls_of(message_of(served, messages=messages)) == [("f", '{"a": 1}')]
    assert prompt_of(served).startswith("user\nYou can call functions")
    assert prompt_of(served).endswith("\n\nBe brief.\n\nHi\nassistant\n")


def test_a_template_whose_format_is_not_known_is_not_asked_to_tell_it(serve: Serve) -> None:
    served = serve(CALL, UNKNOWN_FORMAT + TEMPLATE)
    assert calls_of(message_of(served)) == [("f", '{"a": 1}')]
    assert "<function=" not in prompt_of(served)
    named = serve(CALL, UNKNOWN_FORMAT + TEMPLATE, tool_call_parser="hermes")
    assert calls_of(message_of(named)) == [("f", '{"a": 1}')]
    assert "<function=f>" in prompt_of(named)
    assert "You can call functions" not in prompt_of(named)


def test_calls_of_the_history_have_the_same_form(serve: Serve) -> None:
    served = serve("Fine.")
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "2"},
    ]
    assert message_of(served, messages=messages, tools=[])["content"] == "Fine."
    assert f"assistant\n{CALL}" in prompt_of(served)
    assert "user\n<tool_response>\n2\n</tool_response>" in prompt_of(served)
