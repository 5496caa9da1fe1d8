"""``tools`` and ``tool_choice`` of a request.

https://platform.openai.com/docs/guides/function-calling
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from octavo.errors import InvalidParameter
from octavo.grammar.forms import Form
from octavo.server.errors import UnsupportedParameter
from octavo.text.message_format import MessageConstraints, Tool

MAX_TOOLS = 256
NO_ARGUMENTS = ("array", "boolean", "integer", "null", "number", "string")
"""Types that the parameters of a function cannot have."""
_NAME = re.compile(r"[A-Za-z0-9_.:-]{1,128}")
_CHOICES = '\'none\', \'auto\', \'required\' or {"type": "function", "function": {"name": ...}}'

ToolChoice = str | dict[str, Any]


@dataclass(frozen=True)
class ToolUse:
    """The tools of a request."""

    given: list[dict[str, Any]]
    """As sent by the client, for the chat template."""
    tools: tuple[Tool, ...]
    mode: Literal["auto", "required", "named"]
    """Whether the model may call, must call, or must call the single function in ``allowed``."""
    allowed: tuple[Tool, ...]
    """The functions that may be called."""
    is_parallel: bool

    @property
    def names(self) -> frozenset[str]:
        return frozenset(tool.name for tool in self.allowed)

    @property
    def is_strict(self) -> bool:
        return any(tool.is_strict for tool in self.allowed)

    @property
    def must_call(self) -> bool:
        return self.mode != "auto"


def tool_use(tools: list[dict[str, Any]], choice: ToolChoice | None, is_parallel: bool) -> ToolUse | None:
    """Parse ``tools`` and ``tool_choice``; ``None`` when no calls are possible. Raises ``InvalidParameter``."""
    if not tools:
        if choice not in (None, "none", "auto"):
            raise InvalidParameter("tool_choice", "'tool_choice' is only allowed when 'tools' are given.")
        return None
    if len(tools) > MAX_TOOLS:
        raise InvalidParameter("tools", f"'tools' takes at most {MAX_TOOLS} functions.")
    found = tuple(_tool(tool, f"tools[{index}]") for index, tool in enumerate(tools))
    names = [tool.name for tool in found]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise InvalidParameter("tools", f"'tools' has two functions with the name '{twice}'.")
    if choice == "none":
        return None
    if choice is None or choice == "auto":
        return ToolUse(tools, found, "auto", found, is_parallel)
    if choice == "required":
        return ToolUse(tools, found, "required", found, is_parallel)
    allowed = tuple(tool for tool in found if tool.name == _named(choice))
    if not allowed:
        raise InvalidParameter("tool_choice", "'tool_choice' names a function that 'tools' does not have.")
    return ToolUse(tools, found, "named", allowed, False)


def message_constraints(form: Form | None, tools: ToolUse | None) -> MessageConstraints | None:
    """The constraint on the message for content of ``form`` and these tools; ``None`` if unconstrained."""
    if tools is None:
        return None if form is None else MessageConstraints(form)
    if tools.must_call:
        return MessageConstraints(None, tools.allowed, tools.is_parallel)
    if form is not None or tools.is_strict:
        return MessageConstraints(form, tools.allowed, tools.is_parallel, allows_text=form is None)
    return None


def _tool(given: dict[str, Any], where: str) -> Tool:
    if given.get("type") != "function":
        kind = str(given.get("type"))[:40]
        raise UnsupportedParameter("tools", f"'{where}.type' is '{kind}'; only 'function' is supported.")
    function = given.get("function")
    if not isinstance(function, Mapping):
        raise InvalidParameter("tools", f"'{where}.function' must be an object with a 'name'.")
    name, parameters = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        message = f"'{where}.function.name' must have 1 to 128 letters, digits or characters out of '_.:-'."
        raise InvalidParameter("tools", message)
    if not isinstance(function.get("description"), str | None):
        raise InvalidParameter("tools", f"'{where}.function.description' must be a string.")
    place = f"{where}.function.parameters"
    if not isinstance(parameters, Mapping | None):
        raise InvalidParameter("tools", f"'{place}' must be a JSON schema: an object.")
    kinds = (parameters or {}).get("type")
    if kinds in NO_ARGUMENTS or (isinstance(kinds, list) and kinds and "object" not in kinds):
        raise InvalidParameter("tools", f"'{place}.type' must be 'object', since arguments have names.")
    if not isinstance(function.get("strict"), bool | None):
        raise InvalidParameter("tools", f"'{where}.function.strict' must be true or false.")
    return Tool(name, parameters, bool(function.get("strict")), place)


def _named(choice: ToolChoice) -> str:
    function = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        raise InvalidParameter("tool_choice", f"'tool_choice' must be {_CHOICES}.")
    return name
