"""``[TOOL_CALLS]`` and then a list of calls, or a name with its arguments: Mistral's models.

Up to version 7 of their tokenizer a list ``[{"name": ..., "arguments": {...}}, ...]`` follows; from version 11 on each
call is ``[TOOL_CALLS]name[ARGS]{...}``, perhaps with ``[CALL_ID]id`` behind the name.
https://docs.mistral.ai/guides/tokenization/ and the sources of mistral-common
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from octavo.grammar.forms import literal
from octavo.text.reader import Call, Format, Reader, Steps
from octavo.text.tool_calls.tool_format import Marks, ToolFormat, one_of, repeated, short_id
from octavo.text.tool_calls.values import calls_in, cut_call, cut_calls_in, make_call, value_of

MARK, ARGUMENTS, ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"


def _read(names: frozenset[str]) -> Format:
    return _read_message


def _read_message(reader: Reader) -> Steps[None]:
    while (yield from reader.text_until((MARK,))) is not None:
        yield from reader.attempt(_read_calls, MARK)


def _read_calls(reader: Reader) -> Steps[list[Call] | None]:
    yield from reader.blanks()
    if (yield from reader.comes("[")):
        text = yield from reader.json("[")
        return (calls_in(text) or None) if text is not None else cut_calls_in(reader.take_cut())
    found = yield from reader.until((ARGUMENTS, ID, "{"))
    if found is None:
        return None
    name, mark = found
    if mark == ID and (yield from reader.until((ARGUMENTS,))) is None:
        return None
    if mark == "{":
        reader.step_back(mark)
    yield from reader.blanks()
    text = yield from reader.json()
    if text is None:
        call = cut_call(name.strip(), reader.take_cut()) if reader.is_cut else None
    else:
        call = make_call(name.strip(), value_of(text))
    return None if call is None else [call]


def _rules(names: Sequence[str], marks: Marks, parallel: bool) -> str:
    if marks.has(ARGUMENTS):
        heads = [f"{literal(name)} {marks.lark(ARGUMENTS)}" for name in names]
        rest = repeated("call", marks.lark(MARK), parallel)
        return f"calls: {marks.lark(MARK)} rest\nrest: {rest}\ncall: {one_of(heads, '')}\n"
    heads = [literal(f'{{"name": {json.dumps(name)}, "arguments": ') for name in names]
    rest = f"{literal('[')} {repeated('call', literal(', '), parallel)} {literal(']')}"
    return f"calls: {marks.lark(MARK)} rest\nrest: {rest}\ncall: {one_of(heads, literal('}'))}\n"


MISTRAL = ToolFormat(
    name="mistral", read=_read, rules=_rules, opens=MARK, marks=(MARK, ARGUMENTS, ID), signs=(MARK,), new_id=short_id
)
