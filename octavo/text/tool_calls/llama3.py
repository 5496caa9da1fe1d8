"""``{"name": ..., "parameters": {...}}`` at the beginning of the message: Llama 3.1 to 3.3.

Several calls follow each other, separated by ``;``, a line end or anything of the kind. A call may be opened by
``<|python_tag|>``. Without that mark, only calls of the client's functions are calls: any other JSON is content.
https://www.llama.com/docs/model-cards-and-prompt-formats/llama3_1/#json-based-tool-calling
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

from octavo.grammar.forms import literal
from octavo.text.message_parser import Call, Steps, TextReader
from octavo.text.tool_calls import json_calls
from octavo.text.tool_calls.tool_format import Marks, ToolFormat, one_of, repeated
from octavo.text.tool_calls.values import Functions

MARK = "<|python_tag|>"


def _read(functions: Functions) -> Callable[[TextReader], Steps[None]]:
    def read(reader: TextReader) -> Steps[None]:
        yield from reader.attempt(_read_calls(reader, functions.__contains__))
        while (yield from reader.text_until((MARK,))) is not None:
            yield from reader.attempt(_read_calls(reader, json_calls.any_name), MARK)

    return read


def _read_calls(reader: TextReader, accepts: Callable[[str], bool]) -> Steps[None]:
    yield from reader.blanks()
    yield from json_calls.read_calls(reader, accepts)
    yield from reader.closing(";")


def _write(calls: Sequence[Call]) -> str:
    return "; ".join(json_calls.written(call.name, call.arguments, arguments_key="parameters") for call in calls)


def _rules(names: Sequence[str], marks: Marks, parallel: bool) -> str:
    heads = [literal(f'{{"name": {json.dumps(name)}, "parameters": ') for name in names]
    return f"calls: {repeated('call', literal('; '), parallel)}\ncall: {one_of(heads, literal('}'))}\n"


LLAMA3 = ToolFormat(
    name="llama3_json",
    also=("llama4_json",),
    models="Llama 3.1 to 3.3",
    message=_read,
    rules=_rules,
    opens="{",
    has_mark=False,
    marks=(MARK,),
    signs=((MARK, "parameters"),),
    write=_write,
    is_plain=True,
)
