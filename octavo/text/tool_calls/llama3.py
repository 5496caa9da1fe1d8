"""``{"name": ..., "parameters": {...}}`` as the entire message: Llama 3.1 to 3.3.

Several calls are separated by ``;``. A call may be opened by ``<|python_tag|>``. Without that mark, only a call of one
of the client's functions is parsed as a call: any other JSON is content.
https://www.llama.com/docs/model-cards-and-prompt-formats/llama3_1/#json-based-tool-calling
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from octavo.grammar.forms import literal
from octavo.text.reader import Call, Format, Reader, Steps
from octavo.text.tool_calls.tool_format import Marks, ToolFormat, one_of, repeated
from octavo.text.tool_calls.values import call_in, cut_call_in

MARK = "<|python_tag|>"


def _read(names: frozenset[str]) -> Format:
    def read_known(reader: Reader) -> Steps[list[Call] | None]:
        calls = yield from _read_calls(reader)
        return calls if calls and all(call.name in names for call in calls) else None

    def read(reader: Reader) -> Steps[None]:
        yield from reader.attempt(read_known)
        while (yield from reader.text_until((MARK,))) is not None:
            yield from reader.attempt(_read_calls, MARK)

    return read


def _read_calls(reader: Reader) -> Steps[list[Call] | None]:
    """Calls up to the end of the message or the mark that opens the next calls."""
    calls: list[Call] = []
    while True:
        yield from reader.blanks()
        text = yield from reader.json()
        call = call_in(text) if text is not None else cut_call_in(reader.take_cut())
        if call is None:
            return (calls or None) if reader.is_cut else None
        calls.append(call)
        if (yield from reader.at_end()):
            return calls
        if not (yield from reader.literal(";")) and not (yield from reader.comes(MARK)):
            return None
        if (yield from reader.at_end()) or (yield from reader.comes(MARK)):
            return calls


def _write(calls: Sequence[Call]) -> str:
    return "; ".join(f'{{"name": {json.dumps(call.name)}, "parameters": {call.arguments}}}' for call in calls)


def _rules(names: Sequence[str], marks: Marks, parallel: bool) -> str:
    heads = [literal(f'{{"name": {json.dumps(name)}, "parameters": ') for name in names]
    return f"calls: {repeated('call', literal('; '), parallel)}\ncall: {one_of(heads, literal('}'))}\n"


LLAMA3 = ToolFormat(
    name="llama3_json",
    read=_read,
    rules=_rules,
    opens="{",
    has_mark=False,
    marks=(MARK,),
    signs=(MARK, "parameters"),
    write=_write,
)
