"""Conversations with tools for chat templates without tool support: everything about tools becomes plain text.

The functions and the format of a call are described in the system message, past calls become content of the
assistant, and results become messages of the user.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
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


def with_tools_in_text(
    messages: Sequence[Message], tools: Sequence[Message], write: WriteCalls, *, has_system: bool = True
) -> list[Message]:
    """Normalised ``messages`` with ``tools``, calls and results as text; ``write`` formats the calls.

    Without ``has_system`` the functions are described in the user's first message, for templates that refuse a
    system message.
    """
    rewritten = _with_calls_in_text(messages, write)
    if not tools:
        return rewritten
    listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    instruction = _INSTRUCTION.format(tools=listed, call=write([_EXAMPLE]))
    role = "system" if has_system else "user"
    index = next((index for index, message in enumerate(rewritten) if message["role"] == role), None)
    if index is None:
        return [{"role": role, "content": instruction}, *rewritten]
    own = rewritten[index]["content"]
    rewritten[index]["content"] = _joined(own, instruction) if has_system else _joined(instruction, own)
    return rewritten


def _with_calls_in_text(messages: Sequence[Message], write: WriteCalls) -> list[Message]:
    rewritten: list[Message] = []
    follows_result = False
    for message in messages:
        message = dict(message)
        is_result = message["role"] == "tool"
        if is_result:
            message = {"role": "user", "content": RESULT.format(message["content"])}
        elif calls := message.pop("tool_calls", None):
            functions = [call["function"] for call in calls]
            written = write([Call(f["name"], json.dumps(f["arguments"], ensure_ascii=False)) for f in functions])
            message["content"] = _joined(message["content"], written)
        if follows_result and message["role"] == "user":
            # Many templates require alternating user and assistant messages.
            rewritten[-1]["content"] = _joined(rewritten[-1]["content"], message["content"])
        else:
            rewritten.append(message)
            follows_result = is_result
    return rewritten


def _joined(*texts: str | None) -> str:
    return "\n\n".join(text for text in texts if text)
