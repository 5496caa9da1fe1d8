"""``[TOOL_CALLS]`` and then a list of calls, or a name with its arguments: Mistral's models.

Up to version 7 of their tokenizer a list ``[{"name": ..., "arguments": {...}}, ...]`` follows; from version 11 on each
call is ``[TOOL_CALLS]name[ARGS]{...}``, perhaps with ``[CALL_ID]id`` behind the name.
https://docs.mistral.ai/guides/tokenization/ and the sources of mistral-common
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from octavo.grammar.forms import literal
from octavo.text.message_parser import Call, Steps, TextReader
from octavo.text.tool_calls import json_calls
from octavo.text.tool_calls.tool_format import Marks, ToolFormat, marked, one_of, repeated, short_id
from octavo.text.tool_calls.values import Functions

MARK, ARGUMENTS, ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"


def _read_calls(reader: TextReader, functions: Functions, mark: str) -> Steps[None]:
    yield from reader.blanks()
    if (yield from reader.comes("[", "{")):
        yield from json_calls.read_calls(reader)
        return
    found = yield from reader.until(ARGUMENTS, ID, "{")
    if found is None:
        return
    name, separator = found
    if separator == ID and (yield from reader.until(ARGUMENTS)) is None:
        return
    if separator == "{":
        reader.step_back(separator)
    yield from json_calls.read_arguments(reader, name.strip(), MARK)


def _write(calls: Sequence[Call]) -> str:
    return "".join(f"{MARK}{call.name}{ARGUMENTS}{call.arguments}" for call in calls)


def _rules(names: Sequence[str], marks: Marks, parallel: bool) -> str:
    if marks.has(ARGUMENTS):
        heads = [f"{literal(name)} {marks.lark(ARGUMENTS)}" for name in names]
        rest = repeated("call", marks.lark(MARK), parallel)
        return f"calls: {marks.lark(MARK)} rest\nrest: {rest}\ncall: {one_of(heads, '')}\n"
    heads = [literal(f'{{"name": {json.dumps(name)}, "arguments": ') for name in names]
    rest = f"{literal('[')} {repeated('call', literal(', '), parallel)} {literal(']')}"
    return f"calls: {marks.lark(MARK)} rest\nrest: {rest}\ncall: {one_of(heads, literal('}'))}\n"


MISTRAL = ToolFormat(
    name="mistral",
    models="Mistral, Ministral, Magistral, Devstral: lists of calls and `[ARGS]`",
    message=marked(_read_calls, MARK),
    rules=_rules,
    opens=MARK,
    marks=(MARK, ARGUMENTS, ID),
    signs=((MARK,),),
    new_id=short_id,
    write=_write,
)
