"""``[name(key=value, ...), ...]`` at the beginning of the message: Llama 3.2 and 4, ToolACE and others.

Values are Python literals; ``true``, ``false`` and ``null`` are accepted as well. As the format has no mark, only calls
of the client's functions are calls. https://arxiv.org/abs/2409.00920 (ToolACE)

LFM2 writes the same list between special tokens, Olmo 3 one call a line between tags.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from octavo.grammar.forms import literal
from octavo.text.message_parser import Call, Steps, TextReader
from octavo.text.tool_calls.json_calls import any_name, stream_arguments
from octavo.text.tool_calls.tool_format import Marks, ToolFormat, marked, one_of, repeated
from octavo.text.tool_calls.values import Functions, make_call, text_of

MARKS, CLOSES = ("<|python_tag|>", "<|python_start|>"), ("<|python_end|>",)
MAX_DEPTH = 64
WORDS = {"True": True, "False": False, "None": None, "true": True, "false": False, "null": None}

_MARKS = re.compile(r"""["'{}\[\]()]""")
_NAME = re.compile(r"[^\W\d][\w.\-]*")
_TOKEN = re.compile(
    r"""\s*(?:
        (?P<name>[^\W\d][\w.\-]*)
      | (?P<number>[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)
      | (?P<string>"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')
      | (?P<mark>\*\*|[\[\](){},:=])
    )\s*""",
    re.VERBOSE | re.DOTALL,
)


def _read(functions: Functions) -> Callable[[TextReader], Steps[None]]:
    def read(reader: TextReader) -> Steps[None]:
        yield from reader.attempt(_read_message(reader, functions))

    return read


def _read_message(reader: TextReader, functions: Functions) -> Steps[None]:
    yield from reader.blanks()
    yield from reader.one_of(MARKS)
    yield from reader.blanks()
    yield from read_calls(reader, functions.__contains__)
    yield from reader.closing(*CLOSES)


def read_calls(reader: TextReader, accepts: Callable[[str], bool]) -> Steps[None]:
    """A list of calls, or calls without brackets around them. A call is told once it is complete."""
    is_list = yield from reader.literal("[")
    if not (yield from reader.maybe(_read_call(reader, accepts))):
        return
    while (yield from reader.maybe(_read_next(reader, accepts))):
        pass
    if is_list:
        yield from reader.closing("]")


def _read_next(reader: TextReader, accepts: Callable[[str], bool]) -> Steps[None]:
    yield from reader.closing(",", ";")
    yield from _read_call(reader, accepts)


def _read_call(reader: TextReader, accepts: Callable[[str], bool]) -> Steps[None]:
    yield from reader.blanks()
    first = yield from reader.next()
    head = (yield from reader.until("(")) if _NAME.fullmatch(first) else None
    if head is None or not _NAME.fullmatch(head[0].strip()) or not accepts(head[0].strip()):
        return
    name = head[0].strip()
    if (yield from reader.maybe(_read_spread(reader, name))):
        return
    reader.step_back("(")
    text = yield from reader.enclosed("(", _MARKS)
    if text is not None:
        call = parsed_call(name + text)
    else:
        call = _Parser(name + reader.take_rest()).cut_call() if reader.is_cut else None
    if call is not None:
        reader.add_call(call)


def _read_spread(reader: TextReader, name: str) -> Steps[None]:
    """The arguments as one JSON object, as grammars enforce."""
    yield from reader.blanks()
    if (yield from reader.literal("**")):
        yield from reader.blanks()
        yield from stream_arguments(reader, name)
        yield from reader.closing(")")


def parsed_call(text: str) -> Call | None:
    """The call that ``text`` is; ``None`` if it is none, or has other arguments than literals."""
    try:
        return _Parser(text).call()
    except (ValueError, SyntaxError, RecursionError):
        return None


def literal_of(text: str) -> Any:
    """The value of a Python literal. Raises ``ValueError`` or ``SyntaxError``."""
    parser = _Parser(text)
    value = parser.value()
    parser.expect_end()
    return value


class _Parser:
    """A call with literals as arguments. Raises ``ValueError`` or ``SyntaxError`` for anything else."""

    def __init__(self, text: str) -> None:
        self._tokens: list[tuple[str, str]] = []
        place = 0
        while (found := _TOKEN.match(text, place)) is not None and found.lastgroup is not None:
            self._tokens.append((found.lastgroup, found[found.lastgroup]))
            place = found.end()
        self._is_whole = place == len(text)
        """Whether all of the text is literals and marks."""
        self._next = 0
        self._depth = 0

    def call(self) -> Call:
        name = self._take("name")
        arguments: dict[str, Any] = {}
        self._expect("(")
        while not self._passes(")"):
            arguments.update(self._argument())
            if not self._passes(","):
                self._expect(")")
                break
        self.expect_end()
        call = make_call(name, arguments)
        if call is None:
            raise ValueError("arguments that JSON does not have")
        return call

    def cut_call(self) -> Call | None:
        """The call that the text begins, with the arguments that have a comma behind them."""
        arguments: dict[str, Any] = {}
        try:
            name = self._take("name")
            self._expect("(")
            while True:
                argument = self._argument()
                self._expect(",")
                arguments.update(argument)
        except (ValueError, SyntaxError, RecursionError):
            call = make_call(name, arguments)
        return None if call is None else Call(name, call.arguments[:-1] if arguments else "", is_cut=True)

    def _argument(self) -> dict[str, Any]:
        if self._passes("**"):
            more = self.value()
            if not isinstance(more, dict):
                raise ValueError("only an object can be spread")
            return more
        key = self._take("name")
        self._expect("=")
        return {key: self.value()}

    def expect_end(self) -> None:
        if not self._is_whole or self._next != len(self._tokens):
            raise ValueError("more than literals")

    def value(self) -> Any:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise ValueError("nested too deep")
        kind, text = self._tokens[self._next] if self._next < len(self._tokens) else ("end", "")
        self._next += 1
        if kind == "string" or kind == "number":
            value = ast.literal_eval(text.replace("\n", "\\n").replace("\r", "\\r"))
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
            values.append(self.value())
            if not self._passes(","):
                self._expect(end)
                break
        return values

    def _dict(self) -> dict[str, Any]:
        values: dict[str, Any] = {}
        while not self._passes("}"):
            key = self._take("string")
            self._expect(":")
            values[str(ast.literal_eval(key))] = self.value()
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
    arguments = json.loads(call.arguments)
    if not all(_NAME.fullmatch(name) for name in arguments):
        return f"{call.name}(**{call.arguments})"
    return f"{call.name}({', '.join(f'{name}={text_of(value)}' for name, value in arguments.items())})"


def _call_rule(names: Sequence[str]) -> str:
    # The arguments as one object, so that the schema constrains all of them together.
    return f"call: {one_of([literal(f'{name}(**') for name in names], literal(')'))}\n"


def _rules(names: Sequence[str], marks: Marks, parallel: bool) -> str:
    calls = f"{literal('[')} {repeated('call', literal(', '), parallel)} {literal(']')}"
    return f"calls: {calls}\n{_call_rule(names)}"


PYTHONIC = ToolFormat(
    name="pythonic",
    also=("llama4_pythonic",),
    models="Llama 3.2 and 4, ToolACE",
    message=_read,
    rules=_rules,
    opens="[",
    has_mark=False,
    marks=(*MARKS, *CLOSES),
    signs=(MARKS[1:],),
    write=_write,
    is_plain=True,
)


def _between(closes: str) -> Callable[[TextReader, Functions, str], Steps[None]]:
    def read(reader: TextReader, functions: Functions, mark: str) -> Steps[None]:
        yield from reader.blanks()
        yield from read_calls(reader, any_name)
        yield from reader.closing(closes)

    return read


LFM2_OPENS, LFM2_CLOSES = "<|tool_call_start|>", "<|tool_call_end|>"


def _lfm2_rules(names: Sequence[str], marks: Marks, parallel: bool) -> str:
    rest = f"{literal('[')} {repeated('call', literal(', '), parallel)} {literal(']')} {marks.lark(LFM2_CLOSES)}"
    return f"calls: {marks.lark(LFM2_OPENS)} rest\nrest: {rest}\n{_call_rule(names)}"


LFM2 = ToolFormat(
    name="lfm2",
    models="LFM 2",
    message=marked(_between(LFM2_CLOSES), LFM2_OPENS),
    rules=_lfm2_rules,
    opens=LFM2_OPENS,
    marks=(LFM2_OPENS, LFM2_CLOSES),
    signs=((LFM2_OPENS,), ("<|tool_list_start|>",)),
    write=lambda calls: f"{LFM2_OPENS}{_write(calls)}{LFM2_CLOSES}",
)
OLMO3_OPENS, OLMO3_CLOSES = "<function_calls>", "</function_calls>"


def _olmo3_rules(names: Sequence[str], marks: Marks, parallel: bool) -> str:
    rest = f"{repeated('call', literal(chr(10)), parallel)} {marks.lark(OLMO3_CLOSES)}"
    return f"calls: {marks.lark(OLMO3_OPENS)} rest\nrest: {rest}\n{_call_rule(names)}"


OLMO3 = ToolFormat(
    name="olmo3",
    models="Olmo 3",
    message=marked(_between(OLMO3_CLOSES), OLMO3_OPENS),
    rules=_olmo3_rules,
    opens=OLMO3_OPENS,
    marks=(OLMO3_OPENS, OLMO3_CLOSES),
    signs=((OLMO3_OPENS,),),
    others=("<invoke",),
    write=lambda calls: OLMO3_OPENS + "\n".join(map(_written, calls)) + OLMO3_CLOSES,
)
