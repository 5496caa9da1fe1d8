"""Kimi K2's tool calls in a section between special tokens, each with an id such as ``functions.get_weather:0``.

https://huggingface.co/moonshotai/Kimi-K2-Instruct/blob/main/docs/tool_call_guidance.md
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from octavo.grammar.forms import literal
from octavo.text.message_parser import Call, Steps, TextReader
from octavo.text.tool_calls.json_calls import read_arguments
from octavo.text.tool_calls.tool_format import Marks, ToolFormat, one_of, repeated, section

ALL_BEGIN, ALL_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
BEGIN, ARGUMENTS, END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
_ID = re.compile(r"\s*(?:functions\.)?(.*?)(?::\d+)?\s*", re.DOTALL)


def _read_call(reader: TextReader) -> Steps[None]:
    yield from reader.blanks()
    if not (yield from reader.literal(BEGIN)):
        return
    found = yield from reader.until(ARGUMENTS)
    name = None if found is None else _ID.fullmatch(found[0])
    if name is not None:
        yield from read_arguments(reader, name[1], END, ALL_END)
        yield from reader.closing(END)


def _write(calls: Sequence[Call]) -> str:
    written = [
        f"{BEGIN}functions.{call.name}:{index}{ARGUMENTS}{call.arguments}{END}" for index, call in enumerate(calls)
    ]
    return f"{ALL_BEGIN}{''.join(written)}{ALL_END}"


def _rules(names: Sequence[str], marks: Marks, parallel: bool) -> str:
    heads = [
        f"{marks.lark(BEGIN)} {literal(f'functions.{name}:')} /[0-9]{{1,3}}/ {marks.lark(ARGUMENTS)}" for name in names
    ]
    rest = f"{repeated('call', '', parallel)} {marks.lark(ALL_END)}"
    return f"calls: {marks.lark(ALL_BEGIN)} rest\nrest: {rest}\ncall: {one_of(heads, marks.lark(END))}\n"


KIMI = ToolFormat(
    name="kimi_k2",
    models="Kimi K2",
    message=section(_read_call, ALL_BEGIN, BEGIN, ALL_END),
    rules=_rules,
    opens=ALL_BEGIN,
    more_opens=(BEGIN,),
    marks=(ALL_BEGIN, ALL_END, BEGIN, ARGUMENTS, END),
    signs=((ALL_BEGIN,), ("<|im_middle|>", "tool_declare")),
    write=_write,
)
