"""Messages are brought into one form, and what has no such form is refused by its place."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.errors import InvalidParameter
from octavo.text.chat_messages import normalise_messages


def one(**message: Any) -> dict[str, Any]:
    return normalise_messages([message])[0]


def test_content_becomes_text() -> None:
    assert one(role="user", content="hi") == {"role": "user", "content": "hi"}
    assert one(role="user")["content"] == ""
    assert one(role="assistant", content=None)["content"] == ""
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert one(role="user", content=parts)["content"] == "a\nb"


def test_developer_is_system() -> None:
    assert one(role="developer", content="x")["role"] == "system"


def test_tool_calls_stay_as_they_are() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x":'}}
    assert one(role="assistant", content=None, tool_calls=[call]) == {
        "role": "assistant",
        "content": None,
        "tool_calls": [call],
    }
    assert one(role="tool", content="4", tool_call_id="1")["tool_call_id"] == "1"


def test_the_clients_messages_are_not_changed() -> None:
    message = {"role": "developer", "content": [{"type": "text", "text": "a"}]}
    normalise_messages([message])
    assert message == {"role": "developer", "content": [{"type": "text", "text": "a"}]}


@pytest.mark.parametrize(
    ("messages", "named"),
    [
        ([], "at least one message"),
        ("hi", "must be a list"),
        ({"role": "user"}, "must be a list"),
        (["hi"], r"messages\[0\]"),
        ([{"role": "user", "content": "x"}, {"content": "x"}], r"messages\[1\]\.role"),
        ([{"role": 3, "content": "x"}], r"messages\[0\]\.role"),
        ([{"role": "user", "content": 3}], r"messages\[0\]\.content"),
        (
            [{"role": "user", "content": [{"type": "image_url"}]}],
            r"messages\[0\]\.content\[0\]' is of type 'image_url'",
        ),
        ([{"role": "user", "content": [{"text": "x"}]}], r"messages\[0\]\.content\[0\]"),
        ([{"role": "user", "content": [{"type": "text"}]}], r"messages\[0\]\.content\[0\]\.text"),
        ([{"role": "user", "content": [{"type": "text", "text": None}]}], r"\.text"),
    ],
)
def test_what_is_refused(messages: Any, named: str) -> None:
    with pytest.raises(InvalidParameter, match=named) as caught:
        normalise_messages(messages)
    assert caught.value.param == "messages"


@pytest.mark.parametrize("key", ["reasoning_content", "thinking", "reasoning"])
def test_reasoning_goes_by_the_names_that_templates_know(key: str) -> None:
    (message,) = normalise_messages([{"role": "assistant", "content": "Yes.", key: "Hm."}])
    assert message["reasoning_content"] == message["thinking"] == "Hm."
    (message,) = normalise_messages([{"role": "assistant", "content": "Yes.", key: None}])
    assert message.get("thinking") is None
