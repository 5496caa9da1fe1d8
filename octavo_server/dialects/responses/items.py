"""Input and output items of responses, and their conversion to chat completion messages.

https://platform.openai.com/docs/api-reference/responses
"""

from __future__ import annotations

import json
import uuid
from typing import Any

from octavo.errors import InvalidParameter
from octavo_server.dialects.history import LeftOut, media_of, note, omitted, readable
from octavo_server.dialects.responses.tools import ADDITIONAL, CUSTOM, KEYS, Item, call_of
from octavo_server.http.error_responses import UnsupportedParameter

ROLES = ("user", "assistant", "system", "developer")
REFERENCE = "item_reference"
_ID_PREFIXES = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
    CUSTOM: "ctc",
    "custom_tool_call_output": "ctco",
}
TEXT_PARTS = ("input_text", "output_text", "text", "refusal", "reasoning_text", "summary_text")
_ASKED = ("action", "actions", "operation", "arguments", "code")
"""Members of calls of other tools than functions that say what was asked for."""


def input_items(given: str | list[Item]) -> list[Item]:
    """Input items in stored form: each has a type."""
    if isinstance(given, str):
        return [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": given}]}]
    return [item if item.get("type") is not None else {**item, "type": _type_of(item)} for item in given]


def _type_of(item: Item) -> str | None:
    """The type of an item that does not tell it."""
    if "role" in item:
        return "message"
    return REFERENCE if "id" in item else None


def new_items(items: list[Item]) -> list[Item]:
    """Input items as a conversation has them: with an id and a status, and texts as parts."""
    return [_new_item(item) for item in items]


def _new_item(item: Item) -> Item:
    kind = item["type"]
    found = {**item, "id": f"{_ID_PREFIXES.get(kind, 'item')}_{uuid.uuid4().hex}", "status": "completed"}
    if kind == "reasoning":
        return {"summary": [], **found}
    if kind == "message":
        part = "output_text" if item["role"] == "assistant" else "input_text"
        content = item.get("content") or ""
        parts = [{"type": part, "text": content}] if isinstance(content, str) else content
        found["content"] = [{"annotations": [], **p} if p.get("type") == "output_text" else p for p in parts]
    return found


class ItemMessages:
    """The chat completion messages of ``items``. Raises ``InvalidParameter``.

    Reasoning, calls and text of one assistant turn become members of one message. Items that chat completions do not
    have become calls and results where the client ran the tool, else text; see ``octavo_server.dialects.history``.
    """

    def __init__(
        self,
        items: list[Item],
        left_out: LeftOut,
        field: str = "input",
        num_earlier: int = 0,
        takes_images: bool = False,
    ) -> None:
        """``num_earlier`` of the items come from the store, the others from ``field`` of the request. For a model that
        takes images these are parts of the messages."""
        self._takes_images = takes_images
        self.messages: list[dict[str, Any]] = []
        self.places: list[str] = []
        """The place of the first item of each message."""
        self._left_out = left_out
        self._field = field
        self._has_only_notes = False
        """Whether the last message is one of the assistant that has only the text of other items yet."""
        if not items:
            raise InvalidParameter(field, f"'{field}' must not be empty.")
        answered = max((i for i, item in enumerate(items) if _is_of_assistant(item)), default=-1)
        for place, item in enumerate(items):
            where = f"{field}[{place - num_earlier}]" if place >= num_earlier else "previous_response_id"
            self._add(item, where, is_new=place > answered)
        if not self.messages:
            self._append({"role": "user", "content": ""}, field)

    def _add(self, item: Item, where: str, is_new: bool) -> None:
        kind = item.get("type")
        if not isinstance(kind, str):
            raise InvalidParameter(self._field, f"'{where}.type' must be a string.")
        if kind == "message":
            self._add_message(item, where, is_new)
        elif kind == "reasoning":
            self._add_reasoning(item, where)
        elif kind in KEYS:
            self._merge({"tool_calls": [self._call(item, where)]}, where)
        elif kind in ("function_call_output", "custom_tool_call_output"):
            if not isinstance(item.get("call_id"), str):
                raise InvalidParameter(self._field, f"'{where}.call_id' must be a string.")
            self._append_result(item["call_id"], item, where)
        elif kind != ADDITIONAL:
            self._left_out.add(self._field, kind)
            self._add_other(item, kind, where)

    def _add_message(self, item: Item, where: str, is_new: bool) -> None:
        role, content = item.get("role"), item.get("content")
        if role not in ROLES:
            raise InvalidParameter(self._field, f"'{where}.role' must be one of {', '.join(ROLES)}.")
        if role == "assistant":
            self._merge({"content": self._text(content or "", f"{where}.content")}, where)
            return
        if is_new and isinstance(content, list):
            self._refuse_media(content, f"{where}.content")
        self._append({"role": role, "content": self._content(content, f"{where}.content")}, where)

    def _add_reasoning(self, item: Item, where: str) -> None:
        thought = self._text(item.get("content") or item.get("summary") or "", f"{where}.content")
        if thought:
            self._merge({"reasoning_content": thought}, where)
        elif item.get("encrypted_content"):
            self._left_out.add(self._field, "reasoning.encrypted_content")

    def _add_other(self, item: Item, kind: str, where: str) -> None:
        """Add an item of a tool that is no function, or of another kind."""
        identity = item.get("call_id") or (item.get("id") if kind == "local_shell_call_output" else None)
        if isinstance(identity, str) and kind.endswith("_output"):
            try:
                self._append_result(identity, item, where)
            except InvalidParameter:  # of a form that is not known, as its kind may be
                self._append({"role": "tool", "tool_call_id": identity, "content": readable(item)}, where)
        elif isinstance(identity, str):
            key = next((key for key in _ASKED if item.get(key)), "")
            asked = item.get(key, {})
            asked = asked if isinstance(asked, dict) or key == "arguments" else {key: asked}
            arguments = asked if isinstance(asked, str) else json.dumps(asked, ensure_ascii=False)
            function = {"name": kind.removesuffix("_call"), "arguments": arguments}
            self._merge({"tool_calls": [{"id": identity, "type": "function", "function": function}]}, where)
        elif text := note(kind, item):
            if self._has_only_notes:
                self.messages[-1]["content"] += f"\n{text}"
            else:
                self._append({"role": "assistant", "content": text}, where)
            self._has_only_notes = True

    def _append(self, message: dict[str, Any], where: str) -> None:
        self.messages.append(message)
        self.places.append(where)
        self._has_only_notes = False

    def _append_result(self, call_id: str, item: Item, where: str) -> None:
        output = item.get("output", item.get("result"))
        parts = [output] if isinstance(output, dict) else output or ""
        text = self._content(parts, f"{where}.output") or readable(item)
        self._append({"role": "tool", "tool_call_id": call_id, "content": text}, where)

    def _merge(self, members: dict[str, Any], where: str) -> None:
        """Add members to the assistant message at the end, or append one."""
        last, follows_notes = self.messages[-1] if self.messages else None, self._has_only_notes
        self._has_only_notes = False
        if last is not None and follows_notes and "content" in members:
            last["content"] = "\n".join(text for text in (last["content"], members["content"]) if text)
            return
        begins = last is None or last["role"] != "assistant" or ("content" in members and bool(last["content"]))
        # Reasoning begins a new turn after calls or content.
        if last is None or begins or ("reasoning_content" in members and ("tool_calls" in last or last["content"])):
            self._append({"role": "assistant", "content": "", **members}, where)
            return
        calls = last.get("tool_calls", []) + members.pop("tool_calls", [])
        last.update(members)
        if calls:
            last["tool_calls"] = calls

    def _call(self, item: Item, where: str) -> dict[str, Any]:
        key = KEYS[item["type"]]
        if isinstance(item.get(key), dict):
            item = {**item, key: json.dumps(item[key], ensure_ascii=False)}
        if not all(isinstance(item.get(name), str) for name in ("call_id", "name", key)):
            message = f"'{where}' must have strings as 'call_id', 'name' and '{key}'."
            raise InvalidParameter(self._field, message)
        call = call_of(item)
        return {
            "id": item["call_id"], "type": "function", "function": {"name": call.name, "arguments": call.arguments}
        }  # fmt: skip

    def _content(self, content: Any, where: str) -> str | list[Any]:
        """The text of parts or, with images among them, parts of a chat completion message."""
        if not self._takes_images or not isinstance(content, list) or not any(map(_is_image, content)):
            return self._text(content, where)
        return [
            part if _is_image(part) else {"type": "text", "text": text}
            for place, part in enumerate(content)
            if _is_image(part) or (text := self._part(part, f"{where}[{place}]")) is not None
        ]

    def _text(self, content: Any, where: str) -> str:
        if isinstance(content, str):
            return content
        if not isinstance(content, list):
            raise InvalidParameter(self._field, f"'{where}' must be a string or a list of parts.")
        texts = [self._part(part, f"{where}[{place}]") for place, part in enumerate(content)]
        return "\n".join(text for text in texts if text is not None)

    def _part(self, part: Any, where: str) -> str | None:
        """The text of a part; ``None`` if it has none."""
        if not isinstance(part, dict):
            raise InvalidParameter(self._field, f"'{where}' must be an object with a 'type'.")
        kind = part.get("type")
        if kind in TEXT_PARTS:
            key = "refusal" if kind == "refusal" else "text"
            text = part.get(key)
            if not isinstance(text, str):
                raise InvalidParameter(self._field, f"'{where}.{key}' must be a string.")
            return text
        if kind is not None:
            self._left_out.add(self._field, kind)
        media = media_of(part)
        return readable(part) or None if media is None else omitted(media)

    def _refuse_media(self, content: list[Any], where: str) -> None:
        """Raise ``UnsupportedParameter`` for an image, or another part without text, that shall be answered."""
        for place, part in enumerate(content):
            media = media_of(part) if isinstance(part, dict) else None
            if media is not None and not (self._takes_images and media == "image"):
                message = f"'{where}[{place}].type' '{part['type']}' is not supported; only text is."
                raise UnsupportedParameter(self._field, message)


def _is_of_assistant(item: Item) -> bool:
    kind = item.get("type")
    if kind == "message":
        return item.get("role") == "assistant"
    return isinstance(kind, str) and (kind == "reasoning" or kind.endswith("_call"))


def _is_image(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") in ("input_image", "image_url", "image")
