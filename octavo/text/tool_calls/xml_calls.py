"""Calls whose arguments stand one by one between tags, as text: Qwen3-Coder, GLM, MiniMax, DeepSeek V3.2, Seed-OSS.

    <tool_call><function=NAME><parameter=KEY>VALUE</parameter>...</function></tool_call>

A string is written without quotes and escapes, anything else as JSON; the schema of the function tells which of them a
value is. A string is streamed, as JSON, while it is written.

A closing tag within a value is text of it unless what can follow a value follows. Where a string has all of that, no
reader can tell it from the end, and the value ends there.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

from octavo.text.message_parser import Call, Steps, TextReader
from octavo.text.tool_calls.pythonic import literal_of
from octavo.text.tool_calls.values import Functions, exact_value_of, is_name, text_of, type_of, types_of, value_of

NULLS = ("null", "None")
_NAME = re.compile(r"""[^\s<>"']+""")


@dataclass(frozen=True)
class Tags:
    """The tags of one family."""

    opens: str
    closes: str
    function: tuple[str, str, str]
    """Before a function's name, behind it, and behind its arguments. The last is empty where ``closes`` ends them."""
    key: tuple[str, str]
    """Before an argument's name, and behind it."""
    value: tuple[str, str]
    """Before a value, and behind it. What is between ``key`` and ``value`` are attributes."""
    padding: str = ""
    """What stands around a value."""
    tells_strings: bool = False
    """Whether an attribute of an argument says that it is a string."""
    is_section: bool = False
    """Whether all calls are in one pair of ``opens`` and ``closes``."""

    @property
    def ends(self) -> tuple[str, ...]:
        """What ends the arguments of a function."""
        return (self.function[2], self.closes) if self.function[2] else (self.closes,)

    # ---- reading

    def read_calls(self, reader: TextReader, functions: Functions, mark: str) -> Steps[None]:
        """The calls behind ``mark``, which is ``opens`` or what comes behind it."""
        if mark == self.function[0]:
            reader.step_back(mark)
        if not (yield from reader.maybe(self._read_call(reader, functions))):
            return
        while self.is_section and (yield from reader.maybe(self._read_call(reader, functions))):
            pass
        yield from reader.closing(self.closes)

    def _read_call(self, reader: TextReader, functions: Functions) -> Steps[None]:
        yield from reader.blanks()
        if not (yield from reader.literal(self.function[0])):
            return
        found = yield from reader.until(self.function[1], self.key[0], *self.ends)
        is_last = found is None and reader.is_ended and not reader.is_cut
        name = reader.take_rest().strip() if is_last else "" if found is None else found[0].strip()
        if not is_name(name) or not _NAME.fullmatch(name):
            return
        if found is not None and found[1] != self.function[1]:
            reader.step_back(found[1])
        yield from reader.blanks()
        if (yield from reader.comes(self.key[0], *self.ends)):
            reader.begin_call(name)
            yield from self._read_arguments(reader, functions, name)
        elif self._is_cut_tag(reader) and (reader.is_cut or name in functions):
            reader.take_rest()
            reader.add_call(Call(name, "" if reader.is_cut else "{}", reader.is_cut))

    def _is_cut_tag(self, reader: TextReader) -> bool:
        """Whether the message ends where an argument or the end of the arguments may follow."""
        return any(reader.ends_within(tag) for tag in (self.key[0], *self.ends))

    def _read_arguments(self, reader: TextReader, functions: Functions, name: str) -> Steps[None]:
        separator, is_cut = "{", False
        while not is_cut:
            yield from reader.blanks()
            tag = yield from reader.one_of((self.key[0], *self.ends))
            key = (yield from self._read_key(reader)) if tag == self.key[0] else None
            if key is None:
                if tag == self.closes:
                    reader.step_back(tag)
                elif tag != self.function[2] and reader.is_ended and (tag or self._is_cut_tag(reader)):
                    is_cut = reader.is_cut
                    reader.take_rest()
                break
            types = frozenset({"string"}) if key[1] else types_of(functions, name, key[0])
            reader.add_arguments(f"{separator}{text_of(key[0])}: ")
            separator = ", "
            is_cut = not (yield from self._read_value(reader, types)) and reader.is_cut
        if not is_cut:
            reader.add_arguments("{}" if separator == "{" else "}")
        reader.end_call(is_cut)

    def _read_key(self, reader: TextReader) -> Steps[tuple[str, bool] | None]:
        """An argument's name, and whether its tag says that it is a string; ``None`` if it is not complete."""
        key = yield from reader.until(self.key[1])
        attributes = (yield from reader.until(self.value[0])) if key and self.value[0] else ("", "")
        if key is None or attributes is None:
            return None
        return key[0].strip(), self.tells_strings and '"true"' in attributes[0]

    def _read_value(self, reader: TextReader, types: frozenset[str]) -> Steps[bool]:
        """Emit a value as JSON; returns whether it was closed before the message ended."""
        yield from reader.literal(self.padding)
        is_text = types == {"string"} or (types == {"string", "null"} and not (yield from self._is_null(reader)))
        value = _Streamed(reader, self.padding) if is_text else _Collected(reader, self.padding, types)
        is_closed = yield from reader.pass_value(self.value[1], (self.key[0], *self.ends), value.take)
        if is_closed or not reader.is_cut:
            value.end()
        return is_closed

    def _is_null(self, reader: TextReader) -> Steps[bool]:
        return (yield from reader.comes(*(null + self.padding + self.value[1] for null in NULLS)))

    # ---- writing

    def write(self, calls: Sequence[Call]) -> str:
        """``calls`` as text."""
        written = [self._written(call) for call in calls]
        if self.is_section:
            return "\n".join([self.opens, *written, self.closes])
        line_end = "\n" if self.function[0] else ""
        return "\n".join(f"{self.opens}{line_end}{text}{line_end}{self.closes}" for text in written)

    def _written(self, call: Call) -> str:
        before, behind, end = self.function
        text = f"{before}{call.name}{behind}" + ("" if behind == "\n" else "\n")
        for key, value in (value_of(call.arguments) or {}).items():
            inner = value if isinstance(value, str) else text_of(value)
            text += f"{self.head(key, isinstance(value, str))}{self.padding}{inner}{self.padding}{self.value[1]}\n"
        return text + end

    def head(self, key: str, is_string: bool) -> str:
        """What is written before a value."""
        attribute = f' string="{str(is_string).lower()}"' if self.tells_strings else ""
        between = "\n" if self.value[0].startswith("<") else ""
        return f"{self.key[0]}{key}{self.key[1]}{attribute}{between}{self.value[0]}"


class _Streamed:
    """A string, emitted as JSON while it is read, but for the ``padding`` at its end."""

    def __init__(self, reader: TextReader, padding: str) -> None:
        self._reader = reader
        self._padding = padding
        self._held = ""
        reader.add_arguments('"')

    def take(self, text: str) -> None:
        text = self._held + text
        self._held = self._padding if self._padding and text.endswith(self._padding) else ""
        self._reader.add_arguments(text_of(text.removesuffix(self._held))[1:-1])

    def end(self) -> None:
        self._reader.add_arguments('"')


class _Collected:
    """A value that is JSON, or a string if its schema allows one; emitted when all of it is there."""

    def __init__(self, reader: TextReader, padding: str, types: frozenset[str]) -> None:
        self._reader = reader
        self._padding = padding
        self._types = types
        self._texts: list[str] = []
        self.take = self._texts.append

    def end(self) -> None:
        text = "".join(self._texts).removesuffix(self._padding)
        self._reader.add_arguments(json_of(text, self._types))


def json_of(text: str, types: frozenset[str]) -> str:
    """JSON of a value that is written as JSON, as a Python literal or, where ``types`` allow it, without quotes.

    Without ``types`` it is what it looks like: text in quotes is text that has them. Numbers that JSON lacks are text.
    """
    bare = text.strip()
    try:
        value, found = exact_value_of(bare), bare
    except (ValueError, RecursionError):
        try:
            value = literal_of(bare)
            found = json.dumps(value, ensure_ascii=False, allow_nan=False)
        except (ValueError, SyntaxError, RecursionError):
            return text_of(text)
    kind = type_of(value)
    if kind in types or (kind == "integer" and "number" in types) or (not types and kind != "string"):
        return found
    return text_of(text) if not types or "string" in types else found
