"""What a model can read of the parts of a conversation that have no chat message: tools that another server ran, their
results, documents, media.

A conversation may come from another server or an earlier model. Its past turns are data, so none of them is refused:
a part without a chat message becomes text, or is left out when it has nothing to read.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from octavo_server.http.error_responses import printable

MEDIA = {
    **dict.fromkeys(("image", "image_url", "input_image", "output_image", "computer_screenshot"), "image"),
    "input_audio": "audio",
    "input_file": "file",
    "document": "document",
}
"""Types of parts that may hold something else than text, and what it is called."""
_READ = {
    *("title", "name", "tool_name", "server_label", "tool", "tool_reference", "tool_references", "tools"),
    *("filename", "query", "queries", "url", "source", "context", "text", "refusal", "thinking", "content"),
    *("summary", "code", "logs", "stdout", "stderr", "output", "outputs", "results", "result", "error", "error_code"),
    *("error_message", "message", "reason", "revised_prompt", "description"),
}
"""Members that hold text, or parts with text. Others are ids, signatures, states, or encrypted."""
_WRITTEN = {"input", "arguments", "action", "actions", "operation"}
"""Members that say what a tool was asked to do. They become JSON if they are no text."""


class LeftOut:
    """Names of the parts of a request that the model does not get as they were sent, without repetitions."""

    def __init__(self) -> None:
        self._names: dict[str, None] = {}

    def add(self, field: str, kind: Any) -> None:
        self._names[f"{field}.{printable(str(kind))}"] = None

    @property
    def names(self) -> list[str]:
        return list(self._names)


def media_of(part: Mapping[str, Any]) -> str | None:
    """What a part holds that is no text, such as "image"; ``None`` if it has text that can be read instead."""
    kind = part.get("type")
    name = MEDIA.get(kind) if isinstance(kind, str) else None
    return None if name == "document" and readable(part.get("source")) else name


def omitted(media: str) -> str:
    """The text in the place of an image, a file or other media."""
    return f"[{media} omitted]"


def note(kind: str, part: Mapping[str, Any]) -> str:
    """A part without a chat message as text, with its type; empty if there is nothing to read."""
    text = readable(part)
    return f"[{kind}: {text}]" if text else ""


def readable(value: Any) -> str:
    """The texts in a part that a model can read, one below the other."""
    return "\n".join(_texts(value))


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        if value.strip():
            yield value
    elif isinstance(value, list):
        for each in value:
            yield from _texts(each)
    elif isinstance(value, Mapping):
        yield from _members(value, value.get("type"))


def _members(part: Mapping[str, Any], kind: Any) -> Iterator[str]:
    if isinstance(kind, str) and kind in MEDIA and kind != "document":
        yield omitted(MEDIA[kind])
        return
    if kind == "url":
        return  # the address of media
    if kind == "text" and isinstance(part.get("data"), str):  # the source of a document of plain text
        yield part["data"]
    for name, member in part.items():
        if name in _READ and not (name == "result" and kind == "image_generation_call"):  # which is an image in base64
            yield from _texts(member)
        elif name in _WRITTEN and member:
            yield member if isinstance(member, str) else json.dumps(member, ensure_ascii=False)
