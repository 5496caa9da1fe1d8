"""Validates calls written by a model: a name, and arguments that are a JSON object."""

from __future__ import annotations

import json
import re
from typing import Any

from octavo.text.reader import Call

MAX_NAME_LENGTH = 256
ARGUMENT_KEYS = ("arguments", "parameters")
_HEAD = re.compile(r"""\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")""")
_BETWEEN = re.compile(r"[\s,]*")
_BEFORE_ARGUMENTS = re.compile(r"""\s*(?:,\s*(?:"\w*(?:"\s*(?::\s*)?)?)?)?""")
_ARGUMENTS = re.compile(rf"""\s*,\s*"(?:{"|".join(ARGUMENT_KEYS)})"\s*:\s*(?=\{{)""")


def call_in(text: str | None) -> Call | None:
    """The call in a JSON object of name and arguments; ``None`` if it is invalid."""
    return None if text is None else call_of(value_of(text))


def calls_in(text: str | None) -> list[Call] | None:
    """The calls in a JSON object of name and arguments, or in a list of them; ``None`` if one of them is invalid."""
    value = None if text is None else value_of(text)
    calls = [call_of(each) for each in (value if isinstance(value, list) else [value])]
    found = [call for call in calls if call is not None]
    return found if len(found) == len(calls) else None


def call_of(value: Any) -> Call | None:
    """The call that a JSON value describes; ``None`` if it is invalid."""
    if not isinstance(value, dict):
        return None
    arguments: Any = next((value[key] for key in ARGUMENT_KEYS if key in value), {})
    if isinstance(arguments, str):
        arguments = value_of(arguments)
    return make_call(value.get("name"), arguments)


def cut_call_in(text: str) -> Call | None:
    """The call in a truncated JSON object of name and arguments; ``None`` if there is none."""
    head = _HEAD.match(text)
    if head is None:
        return None
    arguments = _ARGUMENTS.match(text, head.end())
    if arguments is None and not _BEFORE_ARGUMENTS.fullmatch(text, head.end()):
        return None
    return cut_call(value_of(head[1]), "" if arguments is None else text[arguments.end() :])


def cut_calls_in(text: str) -> list[Call] | None:
    """The calls in a truncated list of such objects; ``None`` if it contains anything else."""
    calls: list[Call] = []
    place = 1
    while (place := _BETWEEN.match(text, place).end()) < len(text):  # type: ignore[union-attr]
        try:
            value, end = json.JSONDecoder(strict=False).raw_decode(text, place)
        except (ValueError, RecursionError):
            call, end = cut_call_in(text[place:]), len(text)
        else:
            call = call_of(value)
        if call is None:
            break
        calls.append(call)
        place = end
    return calls or None


def cut_call(name: Any, text: str) -> Call | None:
    """A call whose arguments begin with ``text``, or are the JSON object with which it begins."""
    try:
        value, _ = json.JSONDecoder(strict=False).raw_decode(text)
    except (ValueError, RecursionError):
        value = None
    if value is not None:
        return make_call(name, value)
    call = make_call(name, {})
    return None if call is None or (text and text[0] != "{") else Call(call.name, text, is_cut=True)


def make_call(name: Any, arguments: Any) -> Call | None:
    """A call; ``None`` if the name or the arguments, which must be a JSON object, are invalid."""
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME_LENGTH or not name.isprintable():
        return None
    if not isinstance(arguments, dict):
        return None
    try:
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        text.encode()
    except (ValueError, RecursionError):  # a number that JSON lacks, or an unpaired surrogate
        return None
    return Call(name, text)


def value_of(text: str) -> Any:
    """The value of JSON text; ``None``, which is not a call either, for invalid JSON."""
    try:
        return json.loads(text, parse_constant=_refuse, strict=False)
    except (ValueError, RecursionError):
        return None


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
