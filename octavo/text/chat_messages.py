"""Normalise a client's chat messages to the form that chat templates expect."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from octavo.errors import InvalidParameter

REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")
"""Keys under which clients send a message's reasoning. Most templates read the first, gpt-oss's the second."""


def normalise_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Copies of ``messages`` in which every role is a string and every content is text.

    Parts of type ``text`` are joined by newlines, as in vLLM; parts of other types are refused by name. Missing
    content becomes empty text, except next to ``tool_calls``, where templates expect none. The role ``developer``,
    OpenAI's newer name, becomes ``system``, which templates know. Reasoning under any of ``REASONING_KEYS`` is set
    under both names that templates read, as in transformers. Everything else, such as ``name`` or the arguments of
    tool calls, is unchanged. Raises ``InvalidParameter("messages", ...)``.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)) or not messages:
        raise InvalidParameter("messages", "'messages' must be a list of at least one message.")
    return [_normalise(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _normalise(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise InvalidParameter("messages", f"'{where}' must be an object with 'role' and 'content'.")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise InvalidParameter("messages", f"'{where}.role' must be a string such as 'user'.")
    content = _text(message.get("content"), f"{where}.content")
    if content is None and not message.get("tool_calls"):
        content = ""
    made: dict[str, Any] = {**message, "role": "system" if role == "developer" else role, "content": content}
    reasoning = next((made[key] for key in REASONING_KEYS if made.get(key) is not None), None)
    if reasoning is not None:
        made |= {"reasoning_content": reasoning, "thinking": made.get("thinking", reasoning)}
    return made


def _text(content: Any, where: str) -> str | None:
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidParameter("messages", f"'{where}' must be a string or a list of parts.")
    return "\n".join(_part_text(part, f"{where}[{index}]") for index, part in enumerate(content))


def _part_text(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else None
    if not isinstance(kind, str):
        raise InvalidParameter("messages", f"'{where}' must be an object with a 'type'.")
    if kind != "text":
        raise InvalidParameter("messages", f"'{where}' is of type {kind[:40]!r}; only 'text' can be handled.")
    text = part.get("text")
    if not isinstance(text, str):
        raise InvalidParameter("messages", f"'{where}.text' must be a string.")
    return text
