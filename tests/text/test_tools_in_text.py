"""Tools as text: what a model sees of them whose chat template has no place for them."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.text.chat_messages import normalise_messages, with_calls_in_text, with_tools_told
from octavo.text.message_parser import Call, MessageParser
from octavo.text.tool_calls.hermes import HERMES
from octavo.text.tool_calls.llama3 import LLAMA3
from octavo.text.tool_calls.pythonic import PYTHONIC
from octavo.text.tool_calls.tool_format import ToolFormat

TOOLS = [{"type": "function", "function": {"name": "weather", "description": "Wie ist es in Zürich?"}}]
CALLS = [Call("weather", '{"city": "Z\u00fcrich \\"1\\"", "days": [1, null]}'), Call("f", "{}")]
MADE = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'


def told(messages: list[dict[str, Any]], tools: Any = TOOLS, **more: Any) -> list[dict[str, Any]]:
    rewritten = with_calls_in_text(normalise_messages(messages), HERMES.write)
    return with_tools_told(rewritten, tools, HERMES.write, **more)


def call(**arguments: Any) -> dict[str, Any]:
    return {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": arguments}}


@pytest.mark.parametrize("format", [HERMES, LLAMA3, PYTHONIC], ids=lambda format: format.name)
def test_what_is_written_is_read_again(format: ToolFormat) -> None:
    parser = MessageParser(format.read(frozenset({"weather", "f"})))
    pieces = [*parser.push(format.write(CALLS)), *parser.finish()]
    assert [piece for piece in pieces if isinstance(piece, Call)] == CALLS


def test_arguments_that_are_nested_too_deep_are_text() -> None:
    """As malformed ones are: a model has written them."""
    deep = '{"a":' * 900 + "1" + "}" * 900
    calls = [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": deep}}]
    messages = normalise_messages([{"role": "assistant", "content": "", "tool_calls": calls}])
    assert messages[0]["tool_calls"][0]["function"]["arguments"] == deep
    [told] = with_calls_in_text(messages, PYTHONIC.write)
    assert told["content"].startswith("[f(")


def test_functions_and_call_format_follow_the_system_message() -> None:
    user = {"role": "user", "content": "Hi"}
    own, (first, second) = told([{"role": "developer", "content": "Be brief."}, user]), told([user])
    assert first["role"] == "system"
    assert second == user
    assert own == [{"role": "system", "content": f"Be brief.\n\n{first['content']}"}, user]
    for part in ('{"type": "function", "function": {"name": "weather"', "Zürich", '<tool_call>\n{"name": "'):
        assert part in first["content"]


def test_a_template_may_have_no_system_message() -> None:
    (message,) = told([{"role": "user", "content": "Hi"}], has_system=False)
    assert message["role"] == "user"
    assert message["content"].startswith("You can call functions")
    assert message["content"].endswith("\n\nHi")


def test_calls_and_results_of_the_history() -> None:
    history: list[dict[str, Any]] = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": None, "tool_calls": [call(city="Rome")]},
        {"role": "tool", "tool_call_id": "c1", "content": "Sunny {here}."},
        {"role": "tool", "tool_call_id": "c2", "content": [{"type": "text", "text": "Warm."}]},
        {"role": "user", "content": "And?"},
        {"role": "user", "content": "Well?"},
        {"role": "assistant", "content": "I look.", "tool_calls": [call(city="Rome")]},
    ]
    results = "<tool_response>\nSunny {here}.\n</tool_response>\n\n<tool_response>\nWarm.\n</tool_response>"
    assert told(history, []) == [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": MADE},
        {"role": "user", "content": f"{results}\n\nAnd?\n\nWell?"},
        {"role": "assistant", "content": f"I look.\n\n{MADE}"},
    ]
    plain = [{"role": "user", "content": "Hi"}, {"role": "user", "content": "Ho"}]
    assert told(plain, []) == plain
