"""Conversion of content blocks to chat completion messages.

Tool results in a user message become separate messages; reasoning and calls in an assistant message become members of
the message. Other blocks become text, see ``octavo_server.dialects.history``.
"""

from __future__ import annotations

import json
from typing import Any

from octavo.errors import InvalidParameter
from octavo_server.dialects.history import LeftOut, media_of, note, omitted, readable
from octavo_server.http.error_responses import UnsupportedParameter

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


def chat_messages(
    messages: list[dict[str, Any]], left_out: LeftOut, takes_images: bool = False
) -> tuple[list[dict[str, Any]], list[str]]:
    """The conversation as chat completion messages, and the place that each comes from. Raises ``InvalidParameter``.

    What is no text in a user's message is refused if it has not been answered yet; of earlier turns it is left out.
    For a model that takes images these are parts of the messages.
    """
    if not messages:
        raise InvalidParameter("messages", "'messages' must not be empty.")
    answered = max((i for i, message in enumerate(messages) if message.get("role") == "assistant"), default=-1)
    found: list[dict[str, Any]] = []
    places: list[str] = []
    for place, message in enumerate(messages):
        where = f"messages[{place}]"
        found += _message(message, where, left_out, place > answered, takes_images)
        places += [where] * (len(found) - len(places))
    return found, places


def _message(
    message: dict[str, Any], where: str, left_out: LeftOut, is_new: bool, takes_images: bool
) -> list[dict[str, Any]]:
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
    return _of_user(blocks, left_out, is_new, takes_images)


def _of_user(blocks: list[Block], left_out: LeftOut, is_new: bool, takes_images: bool) -> list[dict[str, Any]]:
    """Messages of a user turn: tool results first, as they must follow their calls."""
    results: list[dict[str, Any]] = []
    others: list[Block] = []
    for block, where in blocks:
        if block["type"] == "tool_result":
            results.append(_result(block, where, left_out, takes_images))
            continue
        media = media_of(block)
        if is_new and media is not None and not (takes_images and media == "image"):
            raise UnsupportedParameter("messages", f"'{where}': {media}s are not supported by this server.")
        others.append((block, where))
    if others or not results:
        results.append({"role": "user", "content": _content(others, left_out, takes_images)})
    return results


def _content(blocks: list[Block], left_out: LeftOut, takes_images: bool) -> str | list[dict[str, Any]]:
    """Blocks as one text or, with images among them, as parts."""
    if not takes_images or not any(media_of(block) == "image" for block, _ in blocks):
        return "\n".join(_texts(blocks, left_out))
    parts: list[dict[str, Any]] = []
    for block, where in blocks:
        if media_of(block) == "image":
            parts.append(_image(block, where))
        else:
            parts += ({"type": "text", "text": text} for text in _texts([(block, where)], left_out))
    return parts


def _image(block: dict[str, Any], where: str) -> dict[str, Any]:
    """An image as a part of a chat completion message. Raises ``InvalidParameter``."""
    source = block.get("source")
    kind = source.get("type") if isinstance(source, dict) else None
    key = {"base64": "data", "url": "url", "file": "file_id"}.get(str(kind))
    if not isinstance(source, dict) or key is None or not isinstance(value := source.get(key), str):
        message = f"'{where}.source' must have a 'type' of base64, url or file, and 'data', 'url' or 'file_id'."
        raise InvalidParameter("messages", message)
    if key == "file_id":
        return {"type": "input_image", "file_id": value}
    url = value if key == "url" else f"data:{source.get('media_type', '')};base64,{value}"
    return {"type": "image_url", "image_url": {"url": url}}


def _result(block: dict[str, Any], where: str, left_out: LeftOut, takes_images: bool = False) -> dict[str, Any]:
    content = block.get("content")
    if isinstance(content, list):
        parts = [(part, f"{where}.content[{place}]") for place, part in enumerate(content)]
        for part, part_where in parts:
            _kind(part, part_where)
        content = _content(parts, left_out, takes_images)
    if not isinstance(content, str | list | None) or not isinstance(block.get("tool_use_id"), str):
        raise InvalidParameter("messages", f"'{where}' must have a 'tool_use_id', and text or blocks as 'content'.")
    content = content or ""
    if block.get("is_error"):
        is_text = isinstance(content, str)
        content = f"Error: {content}" if is_text else [{"type": "text", "text": "Error:"}, *content]
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
