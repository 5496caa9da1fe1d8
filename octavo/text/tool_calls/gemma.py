"""Gemma 4's and FunctionGemma's calls: ``call:NAME{key:value,...}``, with strings between tokens of their own.

    <|tool_call>call:get_weather{city:<|"|>Rome<|"|>,days:[1,2]}<tool_call|>

Arguments become JSON while they are written. A grammar has them written as JSON, which is read as well.
https://ai.google.dev/gemma/docs/capabilities/function-calling
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from octavo.grammar.forms import literal
from octavo.text.message_parser import MAX_DEPTH, Steps, TextReader
from octavo.text.message_pieces import Call
from octavo.text.tool_calls.json_calls import stream_arguments
from octavo.text.tool_calls.tool_format import Marks, ToolFormat, marked, one_of, repeated
from octavo.text.tool_calls.values import Functions, text_of, value_of
from octavo.text.tool_calls.xml_calls import json_of

_HEAD = "call:"
_NAME = re.compile(r"[^\s{}<>\"']+")
_ENDS = (",", "}", "]")


@dataclass(frozen=True)
class Tokens:
    """The marks around a call, and around a string."""

    opens: str
    closes: str
    quote: str

    # ---- reading

    def read_calls(self, reader: TextReader, functions: Functions, mark: str) -> Steps[None]:
        yield from reader.blanks()
        found = (yield from reader.until("{")) if (yield from reader.literal(_HEAD)) else None
        if found is None or not _NAME.fullmatch(found[0].strip()):
            return
        name = found[0].strip()
        reader.step_back("{")
        if not (yield from reader.maybe(stream_arguments(reader, name))):
            yield from reader.literal("{")
            reader.begin_call(name)
            is_closed = yield from self._read_members(reader, "}", MAX_DEPTH)
            reader.end_call(is_cut=not is_closed)
            if not is_closed and reader.is_ended:
                reader.take_rest()
        yield from reader.closing(self.closes)

    def _read_members(self, reader: TextReader, end: str, depth: int) -> Steps[bool]:
        """What follows an opening bracket, up to ``end``; returns whether it was closed."""
        before = "{" if end == "}" else "["
        while depth:
            yield from reader.blanks()
            if (yield from reader.literal(end)):
                reader.add_arguments((before if before in "{[" else "") + end)
                return True
            if not (yield from reader.available(1)):
                return False
            if end == "}":
                key = yield from self._read_key(reader)
                if key is None:
                    return False
                before += f"{text_of(key)}: "
            reader.add_arguments(before)
            before = ", "
            if not (yield from self._read_value(reader, depth)):
                return False
            yield from reader.closing(",")
        return False

    def _read_key(self, reader: TextReader) -> Steps[str | None]:
        """A member's name, in quotes or not, with its colon; ``None`` if it is not complete."""
        texts: list[str] = []
        if (yield from reader.literal(self.quote)):
            is_closed = yield from reader.pass_value(self.quote, (":",), texts.append)
            return "".join(texts) if is_closed and (yield from reader.closing(":")) else None
        found = yield from reader.until(":")
        return None if found is None else found[0].strip()

    def _read_value(self, reader: TextReader, depth: int) -> Steps[bool]:
        yield from reader.blanks()
        if (yield from reader.literal(self.quote)):
            reader.add_arguments('"')
            is_closed = yield from reader.pass_value(
                self.quote, _ENDS, lambda text: reader.add_arguments(text_of(text)[1:-1])
            )
            reader.add_arguments('"' if is_closed else "")
            return is_closed
        opening = yield from reader.one_of(("{", "["))
        if opening is not None:
            return (yield from self._read_members(reader, "}" if opening == "{" else "]", depth - 1))
        found = yield from reader.until(*_ENDS)
        if found is None:
            return False
        reader.step_back(found[1])
        reader.add_arguments(json_of(found[0].strip(), frozenset()))
        return True

    # ---- writing

    def write(self, calls: Sequence[Call]) -> str:
        """``calls`` as text."""
        return "".join(
            f"{self.opens}{_HEAD}{call.name}{self._written(value_of(call.arguments))}{self.closes}" for call in calls
        )

    def _written(self, value: Any) -> str:
        if isinstance(value, str):
            return f"{self.quote}{value}{self.quote}"
        if isinstance(value, list):
            return f"[{','.join(map(self._written, value))}]"
        if isinstance(value, dict):
            members = [f"{self._written_key(key)}:{self._written(member)}" for key, member in value.items()]
            return f"{{{','.join(members)}}}"
        return text_of(value)

    def _written_key(self, key: str) -> str:
        return key if re.fullmatch(r"\w+", key) else self._written(key)

    def rules(self, names: Sequence[str], marks: Marks, parallel: bool) -> str:
        """The grammar of calls; their arguments are JSON."""
        heads = [literal(f"{_HEAD}{name}") for name in names]
        opens, closes = marks.lark(self.opens), marks.lark(self.closes)
        rest = f"{repeated('call', opens, parallel)}"
        return f"calls: {opens} rest\nrest: {rest}\ncall: {one_of(heads, closes)}\n"


def _format(name: str, tokens: Tokens, models: str) -> ToolFormat:
    return ToolFormat(
        name=name,
        models=models,
        message=marked(tokens.read_calls, tokens.opens),
        rules=tokens.rules,
        opens=tokens.opens,
        marks=(tokens.opens, tokens.closes, tokens.quote),
        signs=((tokens.opens,),),
        write=tokens.write,
    )


GEMMA4 = _format("gemma4", Tokens("<|tool_call>", "<tool_call|>", '<|"|>'), "Gemma 4")
FUNCTION_GEMMA = _format(
    "functiongemma", Tokens("<start_function_call>", "<end_function_call>", "<escape>"), "FunctionGemma"
)
