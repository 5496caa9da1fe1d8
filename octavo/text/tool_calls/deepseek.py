"""DeepSeek's tool calls between special tokens: V3 and R1 with a fenced JSON block, V3.1 with bare arguments.

https://huggingface.co/deepseek-ai/DeepSeek-V3.1 (ToolCall) and the chat templates of these models.
"""

from __future__ import annotations

from collections.abc import Sequence

from octavo.grammar.forms import literal
from octavo.text.reader import Call, Format, Reader, Steps
from octavo.text.tool_calls.tool_format import Marks, ToolFormat, one_of, repeated
from octavo.text.tool_calls.values import cut_call, make_call, value_of

ALL_BEGIN, ALL_END = "<\uff5ctool\u2581calls\u2581begin\uff5c>", "<\uff5ctool\u2581calls\u2581end\uff5c>"
BEGIN, END = "<\uff5ctool\u2581call\u2581begin\uff5c>", "<\uff5ctool\u2581call\u2581end\uff5c>"
SEPARATOR = "<\uff5ctool\u2581sep\uff5c>"
FENCE, FENCE_END = "```json", "```"


def _read(names: frozenset[str]) -> Format:
    return _read_message


def _read_message(reader: Reader) -> Steps[None]:
    while (yield from reader.text_until((ALL_BEGIN,))) is not None:
        yield from reader.attempt(_read_calls, ALL_BEGIN)


def _read_calls(reader: Reader) -> Steps[list[Call] | None]:
    calls: list[Call] = []
    while True:
        yield from reader.blanks()
        if calls and ((yield from reader.at_end()) or (yield from reader.literal(ALL_END))):
            return calls
        call = (yield from _read_call(reader)) if (yield from reader.literal(BEGIN)) else None
        if call is not None:
            calls.append(call)
        else:
            reader.take_cut()  # an incomplete call is neither a call nor content
            return calls if calls and reader.is_cut else None


def _read_call(reader: Reader) -> Steps[Call | None]:
    head = yield from reader.until((SEPARATOR,))
    if head is None:
        return None
    name = head[0]
    yield from reader.blanks()
    is_fenced = not (yield from reader.comes("{"))
    if is_fenced:
        head = yield from reader.until((FENCE,))
        if head is None:
            return None
        name = head[0]
        yield from reader.blanks()
    text = yield from reader.json()
    if text is None:
        return cut_call(name.strip(), reader.take_cut()) if reader.is_cut else None
    if is_fenced:
        yield from reader.blanks()
        if not (yield from reader.literal(FENCE_END)) and not reader.is_cut:
            return None
    if not (yield from reader.at_end()) and not (yield from reader.literal(END)) and not reader.take_cut():
        return None
    return make_call(name.strip(), value_of(text))


def _fenced_rules(names: Sequence[str], marks: Marks, parallel: bool) -> str:
    begin = f"{marks.lark(BEGIN)} {literal('function')} {marks.lark(SEPARATOR)}"
    heads = [f"{begin} {literal(f'{name}{chr(10)}{FENCE}{chr(10)}')}" for name in names]
    return _rules(heads, f"{literal(chr(10) + FENCE_END)} {marks.lark(END)}", marks, parallel, literal("\n"))


def _plain_rules(names: Sequence[str], marks: Marks, parallel: bool) -> str:
    heads = [f"{marks.lark(BEGIN)} {literal(name)} {marks.lark(SEPARATOR)}" for name in names]
    return _rules(heads, marks.lark(END), marks, parallel, "")


def _rules(heads: Sequence[str], tail: str, marks: Marks, parallel: bool, separator: str) -> str:
    rest = f"{repeated('call', separator, parallel)} {marks.lark(ALL_END)}"
    return f"calls: {marks.lark(ALL_BEGIN)} rest\nrest: {rest}\ncall: {one_of(heads, tail)}\n"


_MARKS = (ALL_BEGIN, ALL_END, BEGIN, SEPARATOR, END)
DEEPSEEK_V3 = ToolFormat(
    name="deepseek_v3", read=_read, rules=_fenced_rules, opens=ALL_BEGIN, marks=_MARKS, signs=(ALL_BEGIN, FENCE)
)
DEEPSEEK_V31 = ToolFormat(
    name="deepseek_v31", read=_read, rules=_plain_rules, opens=ALL_BEGIN, marks=_MARKS, signs=(ALL_BEGIN,)
)
