"""Conversations with tools for chat templates without tool support: everything about tools becomes plain text.

The functions and the format of a call are described in the system message, past calls become content of the
assistant, and results become messages of the user.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from octavo.text.message_pieces import Call

RESULT = "<tool_response>\n{}\n</tool_response>"
_EXAMPLE = Call("function-name", '{"argument-name": "value"}')
_INSTRUCTION = """\
You can call functions. These are available:
<tools>
{tools}
</tools>

If one of them helps with the question, reply only with a call, in this form:
{call}

If none of them helps, reply in plain text."""

Message = dict[str, Any]
WriteCalls = Callable[[Sequence[Call]], str]


def with_tools_told(
    messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], write: WriteCalls, *, has_system: bool = True
) -> list[Message]:
    """``messages`` with a description of ``tools``; ``write`` formats the example of a call.

    Without ``has_system`` the functions are described in the user's first message, for templates that refuse a
    system message.
    """
    if not tools:
        return list(messages)
    listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    instruction = _INSTRUCTION.format(tools=listed, call=write([_EXAMPLE]))
    role = "system" if has_system else "user"
    index = next((index for index, message in enumerate(messages) if message["role"] == role), None)
    if index is None:
        return [{"role": role, "content": instruction}, *messages]
    own = messages[index]["content"]
    told = joined(own, instruction) if has_system else joined(instruction, own)
    return [*messages[:index], {**messages[index], "content": told}, *messages[index + 1 :]]


def with_calls_in_text(messages: Sequence[Message], write: WriteCalls) -> list[Message]:
    """Normalised ``messages`` with calls and results as text; ``write`` formats the calls.

    Results and what the user writes behind them are one message: many templates require alternating turns.
    """
    turns: list[tuple[Message, list[str | None]]] = []
    called: dict[Any, Message] = {}
    """Functions of the last message with calls, by the calls' ids."""
    follows_result = False
    for message in messages:
        message = dict(message)
        is_result = message["role"] == "tool"
        if is_result:
            function = called.get(message.get("tool_call_id")) if len(called) > 1 else None
            message = {"role": "user", "content": result_in_text(message["content"], function)}
        elif calls := message.pop("tool_calls", None):
            called = {call.get("id"): call["function"] for call in calls}
            message["content"] = joined(message["content"], _written([call["function"] for call in calls], write))
        if follows_result and message["role"] == "user":
            turns[-1][1].append(message["content"])
        else:
            turns.append((message, [message["content"]]))
            follows_result = is_result
    return [{**turn, "content": texts[0] if len(texts) == 1 else joined(*texts)} for turn, texts in turns]


def _written(functions: Sequence[Message], write: WriteCalls) -> str:
    try:
        return write([Call(each["name"], _as_text(each["arguments"])) for each in functions])
    except (ValueError, AttributeError):  # this format writes each argument for itself
        objects = [args if isinstance(args := each["arguments"], dict) else {"arguments": args} for each in functions]
        return write([Call(each["name"], _as_text(args)) for each, args in zip(functions, objects, strict=True)])


def _as_text(arguments: dict[str, Any] | str) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def result_in_text(content: str | None, function: Message | None = None) -> str:
    """The result of a call as text of the user; it names the ``function`` that was called if that is given."""
    call = "" if function is None else f"{function['name']}({_as_text(function['arguments'])}):\n"
    return RESULT.format(call + (content or ""))


def joined(*texts: str | None) -> str:
    """The texts that are not empty, as paragraphs."""
    return "\n\n".join(text for text in texts if text)
