"""Input and output items of responses, and their conversion to chat completion messages.

https://platform.openai.com/docs/api-reference/responses
"""

from __future__ import annotations

import uuid
from typing import Any

from octavo.errors import InvalidParameter
from octavo.server.errors import UnsupportedParameter, printable

Item = dict[str, Any]
ROLES = ("user", "assistant", "system", "developer")
_ID_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc", "function_call_output": "fco"}
TEXT_PARTS = ("input_text", "output_text", "text", "refusal", "reasoning_text", "summary_text")


def input_items(given: str | list[Item]) -> list[Item]:
    """Input items in stored form. Raises ``InvalidParameter``."""
    if isinstance(given, str):
        return [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": given}]}]
    return [{"type": "message", **item} if "role" in item else item for item in given]


def new_items(items: list[Item]) -> list[Item]:
    """Input items as a conversation has them: with an id and a status, and texts as parts."""
    return [_new_item(item) for item in items]


def _new_item(item: Item) -> Item:
    kind = item["type"]
    found = {**item, "id": f"{_ID_PREFIXES[kind]}_{uuid.uuid4().hex}", "status": "completed"}
    if kind == "reasoning":
        return {"summary": [], **found}
    if kind == "message":
        part = "output_text" if item["role"] == "assistant" else "input_text"
        content = item["content"]
        parts = [{"type": part, "text": content}] if isinstance(content, str) else content
        found["content"] = [{"annotations": [], **p} if p["type"] == "output_text" else p for p in parts]
    return found


def chat_messages(items: list[Item], field: str = "input") -> list[dict[str, Any]]:
    """Convert the items of ``field`` to chat completion messages. Raises ``InvalidParameter``.

    Reasoning, calls and text of one assistant turn become members of one message.
    """
    if not items:
        raise InvalidParameter(field, f"'{field}' must not be empty.")
    messages: list[dict[str, Any]] = []
    for place, item in enumerate(items):
        where = f"{field}[{place}]"
        kind = item.get("type")
        if kind == "message":
            message = _message(item, where)
            if message["role"] == "assistant":
                _merge(messages, message)
            else:
                messages.append(message)
        elif kind == "reasoning":
            thought = _text(item.get("content") or item.get("summary") or [], f"{where}.content")
            if thought:
                _merge(messages, {"reasoning_content": thought})
        elif kind == "function_call":
            _merge(messages, {"tool_calls": [_call(item, where)]})
        elif kind == "function_call_output":
            messages.append(_result(item, where))
        else:
            raise UnsupportedParameter(field, f"'{where}.type' '{printable(str(kind))}' is not supported.")
    return messages


def _merge(messages: list[dict[str, Any]], members: dict[str, Any]) -> None:
    """Add members to the assistant message at the end of ``messages``, or append one."""
    last = messages[-1] if messages else None
    begins = last is None or last["role"] != "assistant" or ("content" in members and bool(last["content"]))
    # Reasoning begins a new turn after calls or content.
    if last is None or begins or ("reasoning_content" in members and ("tool_calls" in last or last["content"])):
        messages.append({"role": "assistant", "content": "", **members})
        return
    calls = last.get("tool_calls", []) + members.pop("tool_calls", [])
    last.update(members)
    if calls:
        last["tool_calls"] = calls


def _message(item: Item, where: str) -> dict[str, Any]:
    role = item.get("role")
    if role not in ROLES:
        raise InvalidParameter(where.partition("[")[0], f"'{where}.role' must be one of {', '.join(ROLES)}.")
    return {"role": role, "content": _text(item.get("content"), f"{where}.content")}


def _text(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidParameter(where.partition("[")[0], f"'{where}' must be a string or a list of parts.")
    texts = []
    for place, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in TEXT_PARTS:
            message = f"'{where}[{place}].type' '{printable(str(kind))}' is not supported; only text is."
            raise UnsupportedParameter(where.partition("[")[0], message)
        text = part.get("refusal" if kind == "refusal" else "text")
        if not isinstance(text, str):
            raise InvalidParameter(where.partition("[")[0], f"'{where}[{place}].text' must be a string.")
        texts.append(text)
    return "\n".join(texts)


def _call(item: Item, where: str) -> dict[str, Any]:
    name, identity, arguments = item.get("name"), item.get("call_id"), item.get("arguments")
    if not (isinstance(name, str) and isinstance(identity, str) and isinstance(arguments, str)):
        raise InvalidParameter(
            where.partition("[")[0], f"'{where}' must have strings as 'call_id', 'name' and 'arguments'."
        )
    return {"id": identity, "type": "function", "function": {"name": name, "arguments": arguments}}


def _result(item: Item, where: str) -> dict[str, Any]:
    if not isinstance(item.get("call_id"), str):
        raise InvalidParameter(where.partition("[")[0], f"'{where}.call_id' must be a string.")
    return {"role": "tool", "tool_call_id": item["call_id"], "content": _text(item.get("output"), f"{where}.output")}
