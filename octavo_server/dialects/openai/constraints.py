"""What the output must be: structured output fields, ``tools`` and ``tool_choice``.

``response_format``, ``structured_outputs`` and the older ``guided_*``:
https://platform.openai.com/docs/guides/structured-outputs and vLLM's extra parameters, with vLLM's semantics.

A custom tool takes text instead of JSON. The model sees it as a function of one string, ``input``; where it is the only
tool that can be called and its text has a grammar, the message is that text itself:
https://platform.openai.com/docs/guides/function-calling
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from pydantic_core import from_json

from octavo.errors import InvalidParameter
from octavo.grammar import forms
from octavo.grammar.forms import FormError, GrammarSource
from octavo.text.message_format import MessageConstraints, Tool
from octavo_server.dialects.openai.common_fields import GenerationFields
from octavo_server.http.error_responses import UnsupportedParameter, printable
from octavo_server.http.request_body import ASKS_NOTHING, exact_float

MAX_TOOLS = 256
NO_ARGUMENTS = ("array", "boolean", "integer", "null", "number", "string")
"""Types that the parameters of a function cannot have."""
_NAME = re.compile(r"[A-Za-z0-9_.:-]{1,128}")
_CHOICES = (
    "'none', 'auto', 'required' or an object whose 'type' is 'function', 'custom' or 'allowed_tools', with a member of "
    "that name"
)
_INPUT = "input"

ToolChoice = str | dict[str, Any]


@dataclass(frozen=True)
class ToolUse:
    """The tools of a request."""

    given: list[dict[str, Any]]
    """The functions for the chat template, as sent by the client; custom tools as functions."""
    tools: tuple[Tool, ...]
    mode: Literal["auto", "required", "named"]
    """Whether the model may call, must call, or must call the single function in ``allowed``."""
    allowed: tuple[Tool, ...]
    """The functions that may be called."""
    is_parallel: bool
    is_older: bool = False
    """Whether they came as ``functions``, and a call is told as ``function_call``."""

    @property
    def names(self) -> frozenset[str]:
        return frozenset(tool.name for tool in self.allowed)

    @property
    def is_strict(self) -> bool:
        return any(tool.is_strict for tool in self.allowed)

    @property
    def must_call(self) -> bool:
        return self.mode != "auto"

    @property
    def custom_names(self) -> frozenset[str]:
        """The tools that take text."""
        return frozenset(tool.name for tool in self.allowed if tool.is_custom)

    @property
    def unbound(self) -> list[str]:
        """Places of formats that do not bind a call that must be made: the text of a grammar cannot be within JSON."""
        if not self.must_call or self.content_as_input is not None:
            return []
        return [tool.place for tool in self.allowed if tool.text is not None and "gbnf" in tool.text]

    @property
    def content_as_input(self) -> forms.Part | None:
        """Grammar of the content, which is a custom tool's input: that tool must be called, and its text has one."""
        return self.allowed[0].text if self.must_call and len(self.allowed) == 1 else None


def tool_use(tools: list[dict[str, Any]], choice: ToolChoice | None, is_parallel: bool) -> ToolUse | None:
    """Parse ``tools`` and ``tool_choice``; ``None`` when no calls are possible. Raises ``InvalidParameter``."""
    if not tools:
        if choice not in (None, "none", "auto"):
            raise InvalidParameter("tool_choice", "'tool_choice' is only allowed when 'tools' are given.")
        return None
    if len(tools) > MAX_TOOLS:
        raise InvalidParameter("tools", f"'tools' takes at most {MAX_TOOLS} functions.")
    given = [_as_function(tool, f"tools[{index}]") for index, tool in enumerate(tools)]
    found = tuple(_tool(tool, f"tools[{index}]") for index, tool in enumerate(tools))
    names = [tool.name for tool in found]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise InvalidParameter("tools", f"'tools' has two functions with the name '{twice}'.")
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        choice, among = _allowed(choice.get("allowed_tools"))
        pairs = [(tool, each) for tool, each in zip(given, found, strict=True) if each.name in among]
        if len(pairs) < len(among):
            raise InvalidParameter("tool_choice", "'tool_choice' names a tool that 'tools' does not have.")
        given, found = [tool for tool, _ in pairs], tuple(each for _, each in pairs)
    if choice == "none":
        return None
    if choice is None or choice == "auto":
        return ToolUse(given, found, "auto", found, is_parallel)
    if choice in ("required", "any"):  # the latter is Mistral's name for it
        return ToolUse(given, found, "required", found, is_parallel)
    allowed = tuple(tool for tool in found if tool.name == _named(choice))
    if not allowed:
        raise InvalidParameter("tool_choice", "'tool_choice' names a function that 'tools' does not have.")
    return ToolUse(given, found, "named", allowed, False)


def functions_use(functions: list[dict[str, Any]], choice: ToolChoice | None) -> ToolUse | None:
    """Parse ``functions`` and ``function_call``, which tools have replaced: at most one is called, and the choice has
    just its name. Raises ``InvalidParameter``, in the words of tools: see ``in_older_words``.

    https://platform.openai.com/docs/api-reference/chat/create
    """
    if isinstance(choice, dict) and isinstance(choice.get("name"), str):
        choice = {"type": "function", "function": choice}
    elif choice not in (None, "none", "auto"):
        message = "'function_call' must be 'none', 'auto' or an object with the 'name' of a function."
        raise InvalidParameter("function_call", message)
    used = tool_use([{"type": "function", "function": function} for function in functions], choice, False)
    if used is None:
        return None
    allowed = tuple(
        tool._replace(place=tool.place.replace("tools", "functions").replace(".function", "")) for tool in used.allowed
    )
    return replace(used, allowed=allowed, is_older=True)


@contextlib.contextmanager
def in_older_words() -> Iterator[None]:
    """Let errors about tools name ``functions`` and ``function_call``."""
    try:
        yield
    except InvalidParameter as error:
        error.message = re.sub(r"'tools(\[\d+\])?(\.function)?", r"'functions\1", error.message)
        error.message = error.message.replace("'tool_choice'", "'function_call'")
        error.param = {"tools": "functions", "tool_choice": "function_call"}.get(error.param or "", error.param)
        raise


def input_of(arguments: str) -> str:
    """The text that a custom tool is called with, out of the arguments of its call, which may be cut."""
    try:
        value = from_json(arguments or "{}", allow_partial="trailing-strings")
    except ValueError:
        return arguments
    text = value.get(_INPUT, "") if isinstance(value, dict) else arguments
    return text if isinstance(text, str) else json.dumps(text, ensure_ascii=False)


def arguments_of(text: str) -> str:
    """The arguments of a call of a custom tool with this text."""
    return json.dumps({_INPUT: text}, ensure_ascii=False)


def message_constraints(form: GrammarSource | None, tools: ToolUse | None) -> MessageConstraints | None:
    """The constraint on the message for content of ``form`` and these tools; ``None`` if unconstrained."""
    if tools is None:
        return None if form is None else MessageConstraints(form)
    if tools.content_as_input is not None:
        return MessageConstraints(forms.just(tools.content_as_input))
    if tools.must_call:
        return MessageConstraints(None, tools.allowed, tools.is_parallel)
    if form is not None or tools.is_strict:
        return MessageConstraints(form, tools.allowed, tools.is_parallel, allows_text=form is None)
    return None


def _tool(given: dict[str, Any], where: str) -> Tool:
    kind = given.get("type")
    if kind not in ("function", "custom"):
        message = f"'{where}.type' is '{printable(str(kind))}'; only 'function' and 'custom' are supported."
        raise UnsupportedParameter("tools", message)
    where = f"{where}.{kind}"
    described = given.get(kind)
    if not isinstance(described, Mapping):
        raise InvalidParameter("tools", f"'{where}' must be an object with a 'name'.")
    name, parameters = described.get("name"), described.get("parameters")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        message = f"'{where}.name' must have 1 to 128 letters, digits or characters out of '_.:-'."
        raise InvalidParameter("tools", message)
    if not isinstance(described.get("description"), str | None):
        raise InvalidParameter("tools", f"'{where}.description' must be a string.")
    if kind == "custom":
        return _custom_tool(name, described.get("format"), f"{where}.format")
    place = f"{where}.parameters"
    if not isinstance(parameters, Mapping | None):
        raise InvalidParameter("tools", f"'{place}' must be a JSON schema: an object.")
    kinds = (parameters or {}).get("type")
    if kinds in NO_ARGUMENTS or (isinstance(kinds, list) and kinds and "object" not in kinds):
        raise InvalidParameter("tools", f"'{place}.type' must be 'object', since arguments have names.")
    if not isinstance(described.get("strict"), bool | None):
        raise InvalidParameter("tools", f"'{where}.strict' must be true or false.")
    return Tool(name, parameters, bool(described.get("strict")), place)


def _custom_tool(name: str, format: Any, where: str) -> Tool:
    """A tool that takes text. Raises ``InvalidParameter``."""
    schema: dict[str, Any] = {"type": "string"}
    text = None
    if format is not None and not (isinstance(format, Mapping) and format.get("type") == "text"):
        syntax, definition = _grammar_of(format, where)
        try:
            text = forms.regex(definition) if syntax == "regex" else forms.grammar(definition)
        except FormError as error:
            raise InvalidParameter("tools", f"'{where}' {error}.") from None
        if syntax == "regex":
            schema["pattern"] = f"^(?:{definition})$"
    parameters = {
        "type": "object", "properties": {_INPUT: schema}, "required": [_INPUT], "additionalProperties": False
    }  # fmt: skip
    return Tool(name, parameters, place=where, is_custom=True, text=text)


def _grammar_of(format: Any, where: str) -> tuple[str, str]:
    """Syntax and definition of a custom tool's format. Raises ``InvalidParameter``."""
    grammar = format.get("grammar") if isinstance(format, Mapping) and format.get("type") == "grammar" else None
    syntax = grammar.get("syntax") if isinstance(grammar, Mapping) else None
    definition = grammar.get("definition") if isinstance(grammar, Mapping) else None
    if syntax not in ("lark", "regex") or not isinstance(definition, str):
        message = f"'{where}' must be of type 'text', or of type 'grammar' with a 'syntax', 'lark' or 'regex', and a "
        raise InvalidParameter("tools", message + "'definition'.")
    return syntax, definition


def _as_function(given: dict[str, Any], where: str) -> dict[str, Any]:
    """A tool as a function, which is what chat templates know."""
    if given.get("type") != "custom":
        return given
    tool = _tool(given, where)
    description, format = given["custom"].get("description") or "", given["custom"].get("format")
    if tool.text is not None:
        syntax, definition = _grammar_of(format, where)
        description += f"\nThe {_INPUT} is text of this form ({syntax}):\n{definition}"
    parameters = {
        "type": "object", "properties": {_INPUT: {"type": "string"}}, "required": [_INPUT]
    }  # fmt: skip
    return {"type": "function", "function": {"name": tool.name, "description": description, "parameters": parameters}}


def _allowed(given: Any) -> tuple[str, set[str]]:
    """The mode and the names in ``tool_choice.allowed_tools``."""
    mode = given.get("mode") if isinstance(given, Mapping) else None
    tools = given.get("tools") if isinstance(given, Mapping) else None
    if mode not in ("auto", "required") or not isinstance(tools, list) or not tools:
        message = "'tool_choice.allowed_tools' must have a 'mode', 'auto' or 'required', and a list of 'tools'."
        raise InvalidParameter("tool_choice", message)
    return mode, {_named(tool) for tool in tools}


def _named(choice: Any) -> str:
    # Hugging Face's clients send the function alone.
    kind = choice.get("type", "function") if isinstance(choice, Mapping) else None
    named = choice.get(kind) if kind in ("function", "custom") else None
    name = named.get("name") if isinstance(named, Mapping) else None
    if not isinstance(name, str):
        raise InvalidParameter("tool_choice", f"'tool_choice' must be {_CHOICES}.")
    return name


FORMAT_TYPES = ("text", "json_object", "json_schema", "structural_tag")
TGI_FORMAT_TYPES = ("json", "regex")
"""Of TGI's chat completions: the schema or the pattern is their ``value``."""
MAX_NAME_LENGTH = 64


class Constraint(NamedTuple):
    """The form required of the content, and the field that requires it."""

    field: str
    form: GrammarSource


def constraint(body: GenerationFields) -> Constraint | None:
    """The constraint in ``body``, if any. Raises ``InvalidParameter`` about its field, also if there are two."""
    found = list(_given(body))
    if len(found) > 1:
        one, other = (each.field for each in found[:2])
        problem = (
            f"'{one}' takes one form, and has several"
            if one == other
            else f"'{one}' and '{other}' cannot be given together"
        )
        raise InvalidParameter(other, f"{problem}.")
    return found[0] if found else None


def _given(body: GenerationFields) -> Iterator[Constraint]:
    if body.response_format is not None:
        form = _response_format(body.response_format)
        if form is not None:
            yield Constraint("response_format", form)
    if body.structured_outputs:
        yield from _structured_outputs(body.structured_outputs)
    for name in KINDS:
        value = getattr(body, f"guided_{name}")
        if value is not None and value is not False:
            yield Constraint(f"guided_{name}", _made(f"guided_{name}", KINDS[name], value))
    for name, kind in OTHER_NAMES.items():
        if (value := getattr(body, name)) not in ASKS_NOTHING:
            yield Constraint(name, _made(name, KINDS[kind], value))


# --- OpenAI ---


def _response_format(given: Mapping[str, Any]) -> GrammarSource | None:
    kind = given.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return _object_format(given)
    if kind == "json_schema":
        if given.get("json_schema") is None and isinstance(given.get("schema"), Mapping):
            return _made("response_format", _json, given["schema"])
        return _json_schema(given.get("json_schema"))
    if kind == "structural_tag":
        return _made("response_format", _structural_tag, given)
    if kind in TGI_FORMAT_TYPES:
        return _made("response_format", KINDS[kind], given.get("value"), "response_format.value")
    raise InvalidParameter("response_format", f"'response_format.type' must be one of {', '.join(FORMAT_TYPES)}.")


def _object_format(given: Mapping[str, Any]) -> GrammarSource:
    """A JSON object; huggingface_hub sends the schema of one as ``value``, and clients of llama.cpp as ``schema``."""
    for name in ("schema", "value"):
        if (schema := given.get(name)) is not None:
            return _made("response_format", _json, schema, f"response_format.{name}")
    return forms.just(forms.json_object())


def _json_schema(given: Any) -> GrammarSource:
    """``strict`` is ignored: schemas are always enforced."""
    where = "'response_format.json_schema"
    if not isinstance(given, Mapping):
        raise InvalidParameter("response_format", f"{where}' must be an object with 'name' and 'schema'.")
    name = given.get("name")
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME_LENGTH:
        raise InvalidParameter("response_format", f"{where}.name' must be text of 1 to {MAX_NAME_LENGTH} characters.")
    if not isinstance(given.get("schema"), Mapping):
        raise InvalidParameter("response_format", f"{where}.schema' must be a JSON schema: an object.")
    return _made("response_format", _json, given["schema"])


# --- vLLM ---


def _structured_outputs(given: Mapping[str, Any]) -> Iterator[Constraint]:
    for name, value in given.items():
        if value is None or value is False or (value == [] and name != "choice"):
            continue
        where = f"structured_outputs.{name}"
        if name not in STRUCTURED_KINDS:
            raise UnsupportedParameter("structured_outputs", f"'{where[:80]}' is not supported by this server.")
        yield Constraint("structured_outputs", _made("structured_outputs", STRUCTURED_KINDS[name], value, where))


def _json(value: Any) -> GrammarSource:
    if isinstance(value, str):
        try:
            value = json.loads(value, parse_float=exact_float)
        except (ValueError, RecursionError) as error:
            problem = "" if isinstance(error, json.JSONDecodeError | RecursionError) else f"; {error}"
            raise FormError(f"must be a JSON schema: an object, or JSON text of one{problem}") from None
    return forms.just(forms.json_schema(value))


def _json_object(value: Any) -> GrammarSource:
    return forms.just(forms.json_object())


def _structural_tag(value: Any) -> GrammarSource:
    """Parse ``structures`` (each with ``begin``, ``schema`` and ``end``) and ``triggers``."""
    if isinstance(value, str):
        try:
            value = json.loads(value, parse_float=exact_float)
        except (ValueError, RecursionError):
            value = None
    if not isinstance(value, Mapping) or "structures" not in value or "triggers" not in value:
        raise FormError("must have 'structures' and 'triggers'; other kinds of structural tags are not supported")
    structures, triggers = value["structures"], value["triggers"]
    if not isinstance(structures, list) or not isinstance(triggers, list):
        raise FormError("must have lists as 'structures' and 'triggers'")
    if not all(isinstance(trigger, str) for trigger in triggers):
        raise FormError("must have a list of strings as 'triggers'")
    return forms.structural_tags([_tag(structure) for structure in structures], triggers)


def _tag(given: Any) -> forms.Tag:
    if not isinstance(given, Mapping) or not all(isinstance(given.get(key), str) for key in ("begin", "end")):
        raise FormError("must have structures with 'begin', 'schema' and 'end'")
    return forms.Tag(given["begin"], forms.json_schema(given.get("schema")), given["end"])


KINDS: dict[str, Callable[[Any], GrammarSource]] = {
    "json": _json,
    "json_object": _json_object,
    "regex": lambda value: forms.just(forms.regex(value)),
    "choice": lambda value: forms.just(forms.choice(value)),
    "grammar": lambda value: forms.just(forms.grammar(value)),
}
OTHER_NAMES = {"regex": "regex", "ebnf": "grammar", "grammar": "grammar", "json_schema": "json"}
"""What SGLang (the first two) and llama.cpp call them."""
OWN_KIND = "octavo"
"""Kind of the grammars that ``/render`` hands on, with all that a message may have besides its content."""
STRUCTURED_KINDS = KINDS | {"structural_tag": _structural_tag, OWN_KIND: forms.source_of}


def _made(field: str, make: Callable[[Any], GrammarSource], value: Any, where: str = "") -> GrammarSource:
    try:
        return make(value)
    except FormError as error:
        raise InvalidParameter(field, f"'{where or field}' {error}.") from None
