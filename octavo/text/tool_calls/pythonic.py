"""``[name(key=value, ...), ...]`` as the entire message: Llama 3.2 and 4, ToolACE and others.

Values are Python literals; ``true``, ``false`` and ``null`` are accepted as well. As the format has no mark, only calls
of the client's functions are parsed as calls. https://arxiv.org/abs/2409.00920 (ToolACE)
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Sequence
from typing import Any

from octavo.grammar.forms import literal
from octavo.text.reader import Call, Format, Reader, Steps
from octavo.text.tool_calls.tool_format import Marks, ToolFormat, one_of, repeated
from octavo.text.tool_calls.values import cut_call, make_call

MARK = "<|python_tag|>"
MAX_DEPTH = 64
WORDS = {"True": True, "False": False, "None": None, "true": True, "false": False, "null": None}

_MARKS = re.compile(r"""["'{}\[\]()]""")
_SPREAD = re.compile(r"[\[,)\s]*(?P<name>[^\W\d][\w.\-]*)\s*\(\s*\*\*\s*(?=\{)")
_TOKEN = re.compile(
    r"""\s*(?:
        (?P<name>[^\W\d][\w.\-]*)
      | (?P<number>[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)
      | (?P<string>"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*')
      | (?P<mark>\*\*|[\[\](){},:=])
    )\s*""",
    re.VERBOSE | re.DOTALL,
)


def _read(names: frozenset[str]) -> Format:
    def read_calls(reader: Reader) -> Steps[list[Call] | None]:
        yield from reader.blanks()
        yield from reader.literal(MARK)
        yield from reader.blanks()
        text = yield from reader.enclosed("[", _MARKS)
        calls = _calls_in(text) if text is not None else _cut_calls_in(reader.take_cut())
        if not calls or not (yield from reader.at_end()):
            return None
        return calls if all(call.name in names for call in calls) else None

    def read(reader: Reader) -> Steps[None]:
        yield from reader.attempt(read_calls)

    return read


def _calls_in(text: str) -> list[Call] | None:
    try:
        return _Parser(text).calls()
    except (ValueError, SyntaxError):
        return None


def _cut_calls_in(text: str) -> list[Call] | None:
    """The calls in a truncated list whose arguments are one object each, as grammars enforce."""
    calls: list[Call] = []
    place = 0
    while (head := _SPREAD.match(text, place)) is not None:
        try:
            _, end = json.JSONDecoder(strict=False).raw_decode(text, head.end())
        except (ValueError, RecursionError):
            end = len(text)
        call = cut_call(head["name"], text[head.end() : end])
        if call is None:
            break
        calls.append(call)
        place = end
    return calls or None


class _Parser:
    """A list of calls with literals as arguments. Raises ``ValueError`` or ``SyntaxError`` for anything else."""

    def __init__(self, text: str) -> None:
        self._tokens: list[tuple[str, str]] = []
        place = 0
        while place < len(text):
            found = _TOKEN.match(text, place)
            if found is None or found.lastgroup is None:
                raise ValueError("neither a literal nor a mark")
            self._tokens.append((found.lastgroup, found[found.lastgroup]))
            place = found.end()
        self._next = 0
        self._depth = 0

    def calls(self) -> list[Call]:
        self._expect("[")
        calls = []
        while not self._passes("]"):
            calls.append(self._call())
            if not self._passes(","):
                self._expect("]")
                break
        if self._next != len(self._tokens):
            raise ValueError("more than a list")
        return calls

    def _call(self) -> Call:
        name = self._take("name")
        arguments: dict[str, Any] = {}
        self._expect("(")
        while not self._passes(")"):
            if self._passes("**"):
                more = self._value()
                if not isinstance(more, dict):
                    raise ValueError("only an object can be spread")
                arguments.update(more)
            else:
                key = self._take("name")
                self._expect("=")
                arguments[key] = self._value()
            if not self._passes(","):
                self._expect(")")
                break
        call = make_call(name, arguments)
        if call is None:
            raise ValueError("arguments that JSON does not have")
        return call

    def _value(self) -> Any:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise ValueError("nested too deep")
        kind, text = self._tokens[self._next] if self._next < len(self._tokens) else ("end", "")
        self._next += 1
        if kind == "string" or kind == "number":
            value = ast.literal_eval(text)
        elif kind == "name" and text in WORDS:
            value = WORDS[text]
        elif text == "{":
            value = self._dict()
        elif text in ("[", "("):
            value = self._list("]" if text == "[" else ")")
        else:
            raise ValueError("not a literal")
        self._depth -= 1
        return value

    def _list(self, end: str) -> list[Any]:
        values = []
        while not self._passes(end):
            values.append(self._value())
            if not self._passes(","):
                self._expect(end)
                break
        return values

    def _dict(self) -> dict[str, Any]:
        values: dict[str, Any] = {}
        while not self._passes("}"):
            key = self._take("string")
            self._expect(":")
            values[ast.literal_eval(key)] = self._value()
            if not self._passes(","):
                self._expect("}")
                break
        return values

    def _passes(self, mark: str) -> bool:
        found = self._next < len(self._tokens) and self._tokens[self._next] == ("mark", mark)
        self._next += found
        return found

    def _expect(self, mark: str) -> None:
        if not self._passes(mark):
            raise ValueError(f"no {mark}")

    def _take(self, kind: str) -> str:
        if self._next >= len(self._tokens) or self._tokens[self._next][0] != kind:
            raise ValueError(f"no {kind}")
        self._next += 1
        return self._tokens[self._next - 1][1]


def _write(calls: Sequence[Call]) -> str:
    return f"[{', '.join(map(_written, calls))}]"


def _written(call: Call) -> str:
    arguments = json.loads(call.arguments).items()
    return f"{call.name}({', '.join(f'{name}={json.dumps(value, ensure_ascii=False)}' for name, value in arguments)})"


def _rules(names: Sequence[str], marks: Marks, parallel: bool) -> str:
    # The arguments as one object, so that the schema constrains all of them together.
    heads = [literal(f"{name}(**") for name in names]
    calls = f"{literal('[')} {repeated('call', literal(', '), parallel)} {literal(']')}"
    return f"calls: {calls}\ncall: {one_of(heads, literal(')'))}\n"


PYTHONIC = ToolFormat(name="pythonic", read=_read, rules=_rules, opens="[", has_mark=False, marks=(MARK,), write=_write)
