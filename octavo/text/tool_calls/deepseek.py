"""DeepSeek's tool calls between special tokens: V3 and R1 with a fenced JSON block, V3.1 with bare arguments.

https://huggingface.co/deepseek-ai/DeepSeek-V3.1 (ToolCall) and the chat templates of these models.
"""

from __future__ import annotations

from collections.abc import Sequence

from octavo.grammar.forms import literal
from octavo.text.message_parser import Call, Steps, TextReader
from octavo.text.tool_calls.json_calls import read_arguments
from octavo.text.tool_calls.tool_format import Marks, ToolFormat, one_of, repeated, section

ALL_BEGIN, ALL_END = "<\uff5ctool\u2581calls\u2581begin\uff5c>", "<\uff5ctool\u2581calls\u2581end\uff5c>"
BEGIN, END = "<\uff5ctool\u2581call\u2581begin\uff5c>", "<\uff5ctool\u2581call\u2581end\uff5c>"
SEPARATOR = "<\uff5ctool\u2581sep\uff5c>"
KIND, FENCE, FENCE_END = "function", "```json", "```"


def _read_call(reader: TextReader) -> Steps[None]:
    yield from reader.blanks()
    head = (yield from reader.until(SEPARATOR)) if (yield from reader.literal(BEGIN)) else None
    if head is None:
        return
    name = head[0].strip()
    yield from reader.blanks()
    if name == KIND and not (yield from reader.comes("{")):
        head = yield from reader.until(FENCE)
        if head is None:
            return
        name = head[0].strip()
    yield from read_arguments(reader, name, FENCE_END, END, ALL_END)
    yield from reader.closing(FENCE_END)
    yield from reader.closing(END)


def _write_fenced(calls: Sequence[Call]) -> str:
    written = [f"{BEGIN}{KIND}{SEPARATOR}{c.name}\n{FENCE}\n{c.arguments}\n{FENCE_END}{END}" for c in calls]
    return ALL_BEGIN + "\n".join(written) + ALL_END


def _write_plain(calls: Sequence[Call]) -> str:
    return f"{ALL_BEGIN}{''.join(f'{BEGIN}{call.name}{SEPARATOR}{call.arguments}{END}' for call in calls)}{ALL_END}"


def _fenced_rules(names: Sequence[str], marks: Marks, parallel: bool) -> str:
    begin = f"{marks.lark(BEGIN)} {literal(KIND)} {marks.lark(SEPARATOR)}"
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
    name="deepseek_v3",
    models="DeepSeek V3, R1",
    message=section(_read_call, ALL_BEGIN, BEGIN, ALL_END),
    rules=_fenced_rules,
    opens=ALL_BEGIN,
    more_opens=(BEGIN,),
    marks=_MARKS,
    signs=((ALL_BEGIN, FENCE),),
    write=_write_fenced,
)
DEEPSEEK_V31 = ToolFormat(
    name="deepseek_v31",
    models="DeepSeek V3.1",
    message=section(_read_call, ALL_BEGIN, BEGIN, ALL_END),
    rules=_plain_rules,
    opens=ALL_BEGIN,
    more_opens=(BEGIN,),
    marks=_MARKS,
    signs=((ALL_BEGIN,),),
    write=_write_plain,
)
