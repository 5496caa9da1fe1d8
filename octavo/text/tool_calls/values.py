"""From what a model wrote to a call that a client can trust: a name, and arguments that are a JSON object."""

from __future__ import annotations

import json
from typing import Any

from octavo.text.reader import Call

MAX_NAME_LENGTH = 256
ARGUMENT_KEYS = ("arguments", "parameters")


def call_in(text: str | None) -> Call | None:
    """The call in a JSON object of name and arguments; ``None`` when it is none."""
    return None if text is None else call_of(value_of(text))


def call_of(value: Any) -> Call | None:
    """The call that a JSON value spells out; ``None`` when it is none."""
    if not isinstance(value, dict):
        return None
    arguments: Any = next((value[key] for key in ARGUMENT_KEYS if key in value), {})
    if isinstance(arguments, str):
        arguments = value_of(arguments)
    return make_call(value.get("name"), arguments)


def make_call(name: Any, arguments: Any) -> Call | None:
    """A call of a function; ``None`` when the name is none or the arguments are no JSON object."""
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME_LENGTH or not name.isprintable():
        return None
    if not isinstance(arguments, dict):
        return None
    try:
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        text.encode()
    except (ValueError, RecursionError):  # a number that is none in JSON, or half of a surrogate pair
        return None
    return Call(name, text)


def value_of(text: str) -> Any:
    """The value of JSON text; ``None``, which is no call either, for what is not JSON."""
    try:
        return json.loads(text, parse_constant=_refuse, strict=False)
    except (ValueError, RecursionError):
        return None


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
