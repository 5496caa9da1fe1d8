"""The tools of a response request, and its calls: functions, custom tools, which take text, and namespaces of both.

Everything is offered to the model as functions of a chat completion. A tool of a namespace gets a name with its
namespace in front. Tools that a server would have to run are skipped.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from octavo.errors import InvalidParameter
from octavo.text.message_parser import Call
from octavo_server.dialects.history import LeftOut
from octavo_server.dialects.openai.constraints import arguments_of, input_of
from octavo_server.http.error_responses import UnsupportedParameter, printable

Item = dict[str, Any]
OUTSIDE = ("type", "async", "allowed_callers", "defer_loading", "output_schema")
"""Members of a function that a chat completion's function does not have."""
CUSTOM = "custom_tool_call"
KEYS = {"function_call": "arguments", CUSTOM: "input"}
"""Items that are calls, and the member with the text of the call."""
ADDITIONAL = "additional_tools"
ADDING = (ADDITIONAL, "tool_search_output")
"""Items with tools that can be called from then on."""


class OfferedTool(NamedTuple):
    """A tool that the client runs."""

    place: str
    """Where it is in the request, such as "tools[1].tools[0]"."""
    given: dict[str, Any]
    namespace: str | None

    @property
    def name(self) -> Any:
        """Its name for the model."""
        return offered_name(self.given.get("name"), self.namespace)

    def for_chat(self) -> dict[str, Any]:
        """The tool as a chat completion has it."""
        members = {**{key: value for key, value in self.given.items() if key not in OUTSIDE}, "name": self.name}
        if self.given["type"] == "function":
            return {"type": "function", "function": members}
        form = members.get("format")
        if isinstance(form, dict) and form.get("type") == "grammar":
            members["format"] = {"type": "grammar", "grammar": {k: v for k, v in form.items() if k != "type"}}
        return {"type": "custom", "custom": members}


def with_added(tools: list[dict[str, Any]], items: Iterable[Item]) -> list[dict[str, Any]]:
    """``tools`` and those that items of the conversation add; of several with one name, the last."""
    found: dict[Any, dict[str, Any]] = {}
    for item in items:
        added = item.get("tools") if item.get("type") in ADDING else None
        for tool in added if isinstance(added, list) else []:
            if isinstance(tool, dict) and isinstance(tool.get("type"), str) and isinstance(tool.get("name"), str):
                found[tool["type"], tool["name"]] = tool
    if not found:
        return tools
    given = [(tool.get("type"), tool.get("name")) for tool in tools]
    return [*tools, *(tool for named, tool in found.items() if named not in given)]


def offered_name(name: Any, namespace: Any) -> Any:
    """The name that the model knows a tool by."""
    return f"{namespace}__{name}" if isinstance(namespace, str) and namespace else name


def offered_tools(tools: list[dict[str, Any]], left_out: LeftOut) -> list[OfferedTool]:
    """The tools that the client runs; the others are added to ``left_out``. Raises ``InvalidParameter``."""
    return list(_offered(tools, "tools", None, left_out))


def _offered(tools: Any, where: str, namespace: str | None, left_out: LeftOut) -> Iterator[OfferedTool]:
    if not isinstance(tools, list):
        raise InvalidParameter("tools", f"'{where}' must be a list of tools.")
    for index, tool in enumerate(tools):
        place = f"{where}[{index}]"
        kind = tool.get("type") if isinstance(tool, dict) else None
        if not isinstance(kind, str):
            raise InvalidParameter("tools", f"'{place}' must be an object with a 'type'.")
        if kind in ("function", "custom"):
            yield OfferedTool(place, tool, namespace)
        elif kind == "namespace" and namespace is None:
            yield from _offered(tool.get("tools"), f"{place}.tools", tool.get("name"), left_out)
        else:
            left_out.add("tools", kind)


def chat_choice(
    choice: str | dict[str, Any] | None, offered: list[OfferedTool], num_given: int
) -> str | dict[str, Any] | None:
    """``tool_choice`` as in chat completions. Raises ``UnsupportedParameter`` for a call of a tool that was skipped."""
    if choice == "required" and num_given and not offered:
        message = "'tool_choice' is 'required', but this server cannot run any of the 'tools'."
        raise UnsupportedParameter("tool_choice", message)
    if not isinstance(choice, dict):
        return choice
    kind = choice.get("type")
    if kind in ("function", "custom"):
        return _named(choice, kind)
    if kind == "allowed_tools":
        listed = choice.get("tools")
        if not isinstance(listed, list) or not all(isinstance(tool, dict) for tool in listed):
            raise InvalidParameter("tool_choice", "'tool_choice.tools' must be a list of tools.")
        names = [_named(tool, tool["type"]) for tool in listed if tool.get("type") in ("function", "custom")]
        mode = choice.get("mode")
        if mode == "required" and not names:
            message = "'tool_choice' requires a call of tools that this server cannot run."
            raise UnsupportedParameter("tool_choice", message)
        return {"type": kind, "allowed_tools": {"mode": mode, "tools": names}} if names else "none"
    message = f"'tool_choice' names a tool of type '{printable(str(kind))}', which this server cannot run."
    raise UnsupportedParameter("tool_choice", message)


def _named(tool: Mapping[str, Any], kind: str) -> dict[str, Any]:
    return {"type": kind, kind: {"name": offered_name(tool.get("name"), tool.get("namespace"))}}


# --- calls ---


class CallTypes:
    """The tools of a response object by the names that the model knows."""

    def __init__(self, tools: Iterable[dict[str, Any]]) -> None:
        offered = offered_tools(list(tools), LeftOut())
        self._tools = {tool.name: tool for tool in offered if isinstance(tool.name, str)}

    def item(self, name: str) -> Item:
        """An output item that begins a call of the tool that the model knows by this name."""
        tool = self._tools.get(name)
        kind = CUSTOM if tool is not None and tool.given["type"] == "custom" else "function_call"
        item: Item = {"type": kind, "name": name if tool is None else tool.given["name"], KEYS[kind]: ""}
        return item if tool is None or tool.namespace is None else {**item, "namespace": tool.namespace}


def written(kind: str, call: Call) -> str:
    """What an item of this kind has of a call's arguments."""
    return input_of(call.arguments) if kind == CUSTOM else call.arguments


def call_of(item: Item) -> Call:
    """The call that an item reports."""
    name = offered_name(item["name"], item.get("namespace"))
    is_cut = item.get("status") == "incomplete"
    if item["type"] == CUSTOM:
        return Call(name, arguments_of(item["input"]), is_cut)
    return Call(name, item["arguments"], is_cut)
