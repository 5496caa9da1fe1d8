"""Conversion of content blocks to chat completion messages.

Tool results in a user message become separate messages; reasoning and calls in an assistant message become members of
the message. Other blocks become text, see ``octavo_server.dialects.history``.
"""

from __future__ import annotations

import json
from typing import Any

from octavo.errors import InvalidParameter
from octavo_server.dialects.history import LeftOut, media_of, note, omitted, readable
from octavo_server.http.errors import UnsupportedParameter

Block = tuple[dict[str, Any], str]
"""A block, and where it is in the request."""
ROLES = ("user", "assistant", "system")
SHOWN_AS_TEXT = ("text", "document", "search_result", "compaction", "tool_reference")
"""Blocks whose text is all that a model needs of them."""
LABEL = "x-anthropic-billing-header:"
"""Begins a line that Claude Code puts in front of the system prompt; it says nothing to the model, and as it differs
between conversations, no cached prefix would be found."""


def system_text(system: str | list[dict[str, Any]]) -> str:
    """The system prompt without a client's label. Raises ``InvalidParameter``."""
    if isinstance(system, str):
        return _without_label(system)
    texts = []
    for place, block in enumerate(system):
        where = f"system[{place}]"
        if _kind(block, where, "system") != "text":
            raise InvalidParameter("system", f"'{where}.type' must be 'text'.")
        text = _text(block, where, "system")
        if place > 0:
            texts.append(text)
        elif stripped := _without_label(text):
            texts.append(stripped)
    return "\n".join(texts)


def _without_label(text: str) -> str:
    return text.partition("\n")[2] if text.startswith(LABEL) else text


def chat_messages(messages: list[dict[str, Any]], left_out: LeftOut) -> tuple[list[dict[str, Any]], list[str]]:
    """The conversation as chat completion messages, and the place that each comes from. Raises ``InvalidParameter``.

    What is no text in a user's message is refused if it has not been answered yet; of earlier turns it is left out.
    """
    if not messages:
        raise InvalidParameter("messages", "'messages' must not be empty.")
    answered = max((i for i, message in enumerate(messages) if message.get("role") == "assistant"), default=-1)
    found: list[dict[str, Any]] = []
    places: list[str] = []
    for place, message in enumerate(messages):
        where = f"messages[{place}]"
        found += _message(message, where, left_out, is_new=place > answered)
        places += [where] * (len(found) - len(places))
    return found, places


def _message(message: dict[str, Any], where: str, left_out: LeftOut, is_new: bool) -> list[dict[str, Any]]:
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:
        raise InvalidParameter("messages", f"'{where}.role' must be one of {', '.join(ROLES)}.")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if not isinstance(content, list):
        raise InvalidParameter("messages", f"'{where}.content' must be a string or a list of blocks.")
    blocks: list[Block] = []
    for place, block in enumerate(content):
        block_where = f"{where}.content[{place}]"
        _kind(block, block_where)
        blocks.append((block, block_where))
    if role == "assistant":
        return [_of_assistant(blocks, left_out)]
    if role == "system":
        return [{"role": role, "content": "\n".join(_texts(blocks, left_out))}]
    return _of_user(blocks, left_out, is_new)


def _of_user(blocks: list[Block], left_out: LeftOut, is_new: bool) -> list[dict[str, Any]]:
    """Messages of a user turn: tool results first, as they must follow their calls."""
    results: list[dict[str, Any]] = []
    others: list[Block] = []
    for block, where in blocks:
        if block["type"] == "tool_result":
            results.append(_result(block, where, left_out))
            continue
        media = media_of(block)
        if is_new and media is not None:
            raise UnsupportedParameter("messages", f"'{where}': {media}s are not supported by this server.")
        others.append((block, where))
    if others or not results:
        results.append({"role": "user", "content": "\n".join(_texts(others, left_out))})
    return results


def _result(block: dict[str, Any], where: str, left_out: LeftOut) -> dict[str, Any]:
    content = block.get("content")
    if isinstance(content, list):
        parts = [(part, f"{where}.content[{place}]") for place, part in enumerate(content)]
        for part, part_where in parts:
            _kind(part, part_where)
        content = "\n".join(_texts(parts, left_out))
    if not isinstance(content, str | None) or not isinstance(block.get("tool_use_id"), str):
        raise InvalidParameter("messages", f"'{where}' must have a 'tool_use_id', and text or blocks as 'content'.")
    content = content or ""
    if block.get("is_error"):
        content = f"Error: {content}"
    return {"role": "tool", "tool_call_id": block["tool_use_id"], "content": content}


def _of_assistant(blocks: list[Block], left_out: LeftOut) -> dict[str, Any]:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for block, where in blocks:
        kind = block["type"]
        if kind == "thinking":
            thoughts.append(_text(block, where, "messages", key="thinking"))
        elif kind == "tool_use":
            calls.append(_call(block, where))
        elif kind == "text":
            texts.append(_text(block, where, "messages"))
        elif shown := _shown(block, left_out):
            texts.append(f"\n{shown}\n")
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _call(block: dict[str, Any], where: str) -> dict[str, Any]:
    name, identity, values = block.get("name"), block.get("id"), block.get("input", {})
    if not isinstance(name, str) or not isinstance(identity, str):
        raise InvalidParameter("messages", f"'{where}' must have an 'id', a 'name' and an object as 'input'.")
    # Of a call that was cut or malformed, clients may keep the text.
    arguments = values if isinstance(values, str) else json.dumps(values or {}, ensure_ascii=False)
    return {"id": identity, "type": "function", "function": {"name": name, "arguments": arguments}}


def _texts(blocks: list[Block], left_out: LeftOut) -> list[str]:
    """The text of each block that has some."""
    texts = []
    for block, where in blocks:
        text = _text(block, where, "messages") if block["type"] == "text" else _shown(block, left_out)
        if text or block["type"] == "text":
            texts.append(text)
    return texts


def _shown(block: dict[str, Any], left_out: LeftOut) -> str:
    """What a model can read of a block that is no text."""
    kind, media = block["type"], media_of(block)
    if kind == "tool_reference":
        return f"The tool {readable(block)} can be called."
    if media is None and kind in SHOWN_AS_TEXT and (text := readable(block)):
        return text
    left_out.add("messages", kind)
    return note(kind, block) if media is None else omitted(media)


def _kind(block: Any, where: str, field: str = "messages") -> str:
    kind = block.get("type") if isinstance(block, dict) else None
    if not isinstance(kind, str):
        raise InvalidParameter(field, f"'{where}' must be an object with a 'type'.")
    return kind


def _text(block: dict[str, Any], where: str, field: str, key: str = "text") -> str:
    text = block.get(key)
    if not isinstance(text, str):
        raise InvalidParameter(field, f"'{where}.{key}' must be a string.")
    return text
