"""Reads calls that are JSON: an object of a name and arguments, or only the arguments. Arguments are streamed."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from octavo.text.message_parser import Call, Steps, TextReader
from octavo.text.tool_calls.values import is_name, make_call, value_of

ARGUMENT_KEYS = ("arguments", "parameters")
_BEGUN_STRING = re.compile(r'(?:".*)?', re.DOTALL)


def any_name(name: str) -> bool:
    """Accepts every function: a format with marks makes clear what a call is."""
    return True


def read_calls(
    reader: TextReader, accepts: Callable[[str], bool] = any_name, name_key: str = "name", may_be_empty: bool = False
) -> Steps[None]:
    """One call, several behind each other or a list of them, with any separators; those that ``accepts`` the name.

    With ``may_be_empty`` an empty list is read too, as no calls.
    """
    is_list = yield from reader.literal("[")
    yield from reader.blanks()
    if is_list and may_be_empty and (yield from reader.literal("]")):
        reader.accept_none()
        return
    if not (yield from reader.maybe(read_call(reader, accepts, name_key))):
        return
    while (yield from reader.maybe(_read_next(reader, accepts, name_key))):
        pass
    if is_list:
        yield from reader.closing("]")


def _read_next(reader: TextReader, accepts: Callable[[str], bool], name_key: str) -> Steps[None]:
    yield from reader.blanks()
    yield from reader.one_of((",", ";"))
    yield from reader.blanks()
    yield from read_call(reader, accepts, name_key)


def read_call(reader: TextReader, accepts: Callable[[str], bool] = any_name, name_key: str = "name") -> Steps[None]:
    """``{"name": ..., "arguments": {...}}``; further members are left out."""
    if not (yield from reader.literal("{")):
        return
    name: Any = None
    arguments = "{}"
    while True:
        yield from reader.closing(",")
        yield from reader.blanks()
        if (yield from reader.literal("}")):
            _add_call(reader, name, arguments, accepts)
            return
        key = yield from _read_key(reader)
        if key is None:
            break
        if key in ARGUMENT_KEYS and is_name(name) and (yield from reader.comes("{")):
            if accepts(name) and (yield from stream_arguments(reader, name)):
                yield from _skip_members(reader)
            return
        value = yield from _read_value(reader)
        if value is None and key not in ARGUMENT_KEYS:
            return
        if value is None:
            break
        if key == name_key:
            name = value_of(value)
        elif key in ARGUMENT_KEYS:
            arguments = value
    if reader.is_cut and reader.remains(_BEGUN_STRING) and is_name(name) and accepts(name):
        reader.take_rest()
        reader.add_call(Call(name, "", is_cut=True))


def _add_call(reader: TextReader, name: Any, text: str, accepts: Callable[[str], bool]) -> None:
    """A call whose arguments are not streamed: none, a string of JSON, or an object before the name."""
    arguments = value_of(text)
    if isinstance(arguments, str):
        text, arguments = arguments, value_of(arguments)
    call = make_call(name, {} if text.strip() in ("", "null", "[]") else arguments)
    if call is not None and accepts(call.name):
        reader.add_call(call)


def stream_arguments(reader: TextReader, name: str) -> Steps[bool]:
    """Arguments of a call of ``name`` that come next as a JSON object; returns whether they do."""
    if not (yield from reader.begins_object()):
        return False
    reader.begin_call(name)
    is_closed = yield from reader.pass_object()
    reader.end_call(is_cut=not is_closed or value_of(reader.arguments) is None)
    return True


def read_arguments(reader: TextReader, name: str, *ends: str) -> Steps[None]:
    """A call of ``name`` whose arguments come next: an object, or none before one of ``ends`` or the end."""
    if not is_name(name):
        return
    yield from reader.blanks()
    if (yield from reader.comes("{")):
        yield from stream_arguments(reader, name)
        return
    is_empty = (yield from reader.one_of(("null", '""'))) is not None
    if (yield from reader.at_end()):
        is_cut = reader.is_cut and not is_empty
        reader.add_call(Call(name, "" if is_cut else "{}", is_cut))
    elif is_empty or (yield from reader.comes(*ends)):
        reader.add_call(Call(name, "{}"))


def _read_key(reader: TextReader) -> Steps[str | None]:
    """A member's key with its colon; ``None``, at the string or behind it, if none comes."""
    key = yield from reader.string()
    if key is None:
        return None
    yield from reader.blanks()
    if not (yield from reader.literal(":")):
        return None
    yield from reader.blanks()
    return str(value_of(key))


def _read_value(reader: TextReader) -> Steps[str | None]:
    """The text of a member's value; ``None`` if it is not complete."""
    first = yield from reader.next()
    if first == '"':
        return (yield from reader.string())
    if first in ("{", "["):
        return (yield from reader.enclosed(first))
    found = yield from reader.until(",", "}")
    if found is None:
        return None
    reader.step_back(found[1])
    return found[0]


def _skip_members(reader: TextReader) -> Steps[None]:
    """Consume what follows the arguments in the object of a call."""
    while True:
        if (yield from reader.closing("}")):
            return
        if not (yield from reader.closing(",")):
            return
        yield from reader.blanks()
        if (yield from _read_key(reader)) is None or (yield from _read_value(reader)) is None:
            return


def written(name: str, arguments: str, name_key: str = "name", arguments_key: str = "arguments") -> str:
    """The JSON object of a call."""
    return f'{{"{name_key}": {json.dumps(name)}, "{arguments_key}": {arguments}}}'
