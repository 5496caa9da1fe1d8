"""``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``: Hermes, Qwen 2.5 and 3, and many after them.

https://huggingface.co/NousResearch/Hermes-2-Pro-Mistral-7B (Prompt Format for Function Calling)
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from octavo.grammar.forms import literal
from octavo.text.reader import Call, Format, Reader, Steps
from octavo.text.tool_calls.tool_format import Marks, ToolFormat, one_of, repeated
from octavo.text.tool_calls.values import calls_in, cut_call_in, cut_calls_in

OPENS, CLOSES = "<tool_call>", "</tool_call>"


def _read(names: frozenset[str]) -> Format:
    return _read_message


def _read_message(reader: Reader) -> Steps[None]:
    while (yield from reader.text_until((OPENS,))) is not None:
        yield from reader.attempt(_read_call, OPENS)


def _read_call(reader: Reader) -> Steps[list[Call] | None]:
    yield from reader.blanks()
    # Some models write all of their calls as one list, which is empty when they make none.
    is_list = yield from reader.comes("[")
    text = yield from reader.json("[" if is_list else "{")
    calls = calls_in(text) if text is not None else _cut_calls(reader.take_cut(), is_list)
    if calls is None:
        return None
    # Models that end their turn with the call often leave the closing mark out.
    is_closed = (yield from reader.at_end()) or (yield from reader.literal(CLOSES)) or bool(reader.take_cut())
    return calls if is_closed else None


def _cut_calls(text: str, is_list: bool) -> list[Call] | None:
    if is_list:
        return cut_calls_in(text)
    call = cut_call_in(text)
    return None if call is None else [call]


def _write(calls: Sequence[Call]) -> str:
    objects = [f'{{"name": {json.dumps(call.name)}, "arguments": {call.arguments}}}' for call in calls]
    return "\n".join(f"{OPENS}\n{text}\n{CLOSES}" for text in objects)


def _rules(names: Sequence[str], marks: Marks, parallel: bool) -> str:
    heads = [literal(f'{{"name": {json.dumps(name)}, "arguments": ') for name in names]
    opens = marks.lark(OPENS)
    rest = repeated("call", f"{literal(chr(10))} {opens}", parallel)
    call = f'"\\n" function "\\n" {marks.lark(CLOSES)}'
    return f"calls: {opens} rest\nrest: {rest}\ncall: {call}\nfunction: {one_of(heads, literal('}'))}\n"


HERMES = ToolFormat(
    name="hermes",
    read=_read,
    rules=_rules,
    opens=OPENS,
    marks=(OPENS, CLOSES),
    signs=(OPENS, "arguments"),
    others=("<function=", "<arg_key>"),
    write=_write,
)
