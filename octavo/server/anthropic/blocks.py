"""Conversion of content blocks to chat completion messages.

Tool results in a user message become separate messages; reasoning and calls in an assistant message become members of
the message.
"""

from __future__ import annotations

from typing import Any

import msgspec

from octavo.errors import InvalidParameter
from octavo.server.errors import UnsupportedParameter, printable

REFUSED_BLOCKS = {
    "image": "images",
    "document": "documents",
    "search_result": "search results",
    "server_tool_use": "tools that the server runs",
    "web_search_tool_result": "tools that the server runs",
    "container_upload": "uploaded files",
}


def system_text(system: str | list[dict[str, Any]]) -> str:
    """The system prompt. Raises ``InvalidParameter``."""
    if isinstance(system, str):
        return system
    return "\n".join(_text(block, "system", f"system[{place}]") for place, block in enumerate(system))


def chat_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The conversation as chat completion messages. Raises ``InvalidParameter``."""
    if not messages:
        raise InvalidParameter("messages", "'messages' must not be empty.")
    found: list[dict[str, Any]] = []
    for place, message in enumerate(messages):
        found += _message(message, f"messages[{place}]")
    return found


def _message(message: dict[str, Any], where: str) -> list[dict[str, Any]]:
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant"):
        raise InvalidParameter("messages", f"'{where}.role' must be 'user' or 'assistant'; 'system' is a field.")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if not isinstance(content, list):
        raise InvalidParameter("messages", f"'{where}.content' must be a string or a list of blocks.")
    blocks = [(block, f"{where}.content[{place}]") for place, block in enumerate(content)]
    return _of_user(blocks) if role == "user" else [_of_assistant(blocks)]


def _of_user(blocks: list[tuple[Any, str]]) -> list[dict[str, Any]]:
    """Messages of a user turn: tool results first, as they must follow their calls."""
    results, texts = [], []
    for block, where in blocks:
        if _kind(block, where) == "tool_result":
            results.append(_result(block, where))
        else:
            texts.append(_text(block, "messages", where))
    if texts or not results:
        results.append({"role": "user", "content": "\n".join(texts)})
    return results


def _result(block: dict[str, Any], where: str) -> dict[str, Any]:
    content = block.get("content", "")
    if isinstance(content, list):
        content = "\n".join(_text(part, "messages", f"{where}.content[{i}]") for i, part in enumerate(content))
    if not isinstance(content, str) or not isinstance(block.get("tool_use_id"), str):
        raise InvalidParameter("messages", f"'{where}' must have a 'tool_use_id', and text or blocks as 'content'.")
    if block.get("is_error"):
        content = f"Error: {content}"
    return {"role": "tool", "tool_call_id": block["tool_use_id"], "content": content}


def _of_assistant(blocks: list[tuple[Any, str]]) -> dict[str, Any]:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for block, where in blocks:
        kind = _kind(block, where)
        if kind == "thinking" and isinstance(block.get("thinking"), str):
            thoughts.append(block["thinking"])
        elif kind == "tool_use":
            calls.append(_call(block, where))
        else:
            texts.append(_text(block, "messages", where))
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _call(block: dict[str, Any], where: str) -> dict[str, Any]:
    name, identity, values = block.get("name"), block.get("id"), block.get("input")
    if not isinstance(name, str) or not isinstance(identity, str) or not isinstance(values, dict):
        raise InvalidParameter("messages", f"'{where}' must have an 'id', a 'name' and an object as 'input'.")
    arguments = msgspec.json.encode(values).decode()
    return {"id": identity, "type": "function", "function": {"name": name, "arguments": arguments}}


def _kind(block: Any, where: str) -> str:
    kind = block.get("type") if isinstance(block, dict) else None
    if not isinstance(kind, str):
        raise InvalidParameter("messages", f"'{where}' must be an object with a 'type'.")
    if kind in REFUSED_BLOCKS:
        raise UnsupportedParameter("messages", f"'{where}': {REFUSED_BLOCKS[kind]} are not supported by this server.")
    return kind


def _text(block: Any, field: str, where: str) -> str:
    kind = _kind(block, where)
    if kind != "text":
        raise InvalidParameter(field, f"'{where}' cannot be of type '{printable(kind)}' here.")
    if not isinstance(block.get("text"), str):
        raise InvalidParameter(field, f"'{where}.text' must be a string.")
    text: str = block["text"]
    return text
