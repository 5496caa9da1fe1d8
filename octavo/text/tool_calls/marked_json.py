"""JSON calls between marks, one by one or as one list: Hermes and many others, which differ in their marks only."""

from __future__ import annotations

import json
from collections.abc import Sequence

from octavo.grammar.forms import literal
from octavo.text.message_parser import Call, Steps, TextReader
from octavo.text.tool_calls import json_calls
from octavo.text.tool_calls.tool_format import Marks, ToolFormat, marked, one_of, repeated
from octavo.text.tool_calls.values import Functions


def marked_json(
    name: str,
    opens: str,
    closes: str,
    *,
    models: str,
    signs: tuple[tuple[str, ...], ...],
    is_list: bool = True,
    also: tuple[str, ...] = (),
    others: tuple[str, ...] = (),
    more_opens: tuple[str, ...] = (),
    keys: tuple[str, str] = ("name", "arguments"),
    is_plain: bool = False,
) -> ToolFormat:
    """The format with the marks ``opens`` and ``closes``, the second of which may be empty.

    With ``is_list`` all calls are one list between the marks; otherwise each one is a line between marks of its own.
    Both are read in either case. ``keys`` are those of the function's name and of the arguments.
    """
    name_key, arguments_key = keys
    before, behind = ("\n", "\n") if closes else (" ", "")

    def read_calls(reader: TextReader, functions: Functions, mark: str) -> Steps[None]:
        yield from reader.blanks()
        # Some models write all of their calls as one list, which is empty when they make none.
        yield from json_calls.read_calls(reader, name_key=name_key, may_be_empty=True)
        # Models that end their turn with the call often leave the closing mark out.
        yield from reader.closing(*([closes] if closes else []))

    def write(calls: Sequence[Call]) -> str:
        objects = [json_calls.written(call.name, call.arguments, *keys) for call in calls]
        if is_list:
            return f"{opens}[{', '.join(objects)}]{closes}"
        return "\n".join(f"{opens}{before}{text}{behind}{closes}" for text in objects)

    def rules(names: Sequence[str], marks: Marks, parallel: bool) -> str:
        heads = [literal(f'{{"{name_key}": {json.dumps(each)}, "{arguments_key}": ') for each in names]
        first, last = marks.lark(opens), marks.lark(closes) if closes else ""
        if is_list:
            rest = f"{literal('[')} {repeated('call', literal(', '), parallel)} {literal(']')} {last}"
            return f"calls: {first} rest\nrest: {rest}\ncall: {one_of(heads, literal('}'))}\n"
        rest = repeated("call", f"{literal(chr(10))} {first}", parallel)
        call = f"{literal(before)} function {literal(behind) if behind else ''} {last}"
        return f"calls: {first} rest\nrest: {rest}\ncall: {call}\nfunction: {one_of(heads, literal('}'))}\n"

    opening = (opens, *more_opens)
    return ToolFormat(
        name=name,
        also=also,
        models=models,
        message=marked(read_calls, *opening),
        rules=rules,
        opens=opens,
        more_opens=more_opens,
        marks=(*opening, closes) if closes else opening,
        signs=signs,
        others=others,
        write=write,
        is_plain=is_plain,
    )


GRANITE = marked_json(
    "granite",
    "<|tool_call|>",
    "",
    models="Granite 3",
    signs=(("<|tool_call|>",),),
    others=("<|/tool_call|>",),
    more_opens=("<tool_call>",),
)
PHI4 = marked_json(
    "phi4_mini_json",
    "<|tool_call|>",
    "<|/tool_call|>",
    models="Phi-4-mini",
    signs=(("<|/tool_call|>",), ("<|tool|>", "<|/tool|>")),
    more_opens=("functools",),
)
HUNYUAN = marked_json(
    "hunyuan_a13b",
    "<tool_calls>",
    "</tool_calls>",
    models="Hunyuan A13B, Jamba, MiniMax M1",
    signs=(("<tool_calls>",),),
    others=("<invoke", "<tool_sep>"),
    also=("jamba", "minimax"),
)
NEMOTRON = marked_json(
    "nemotron_json", "<TOOLCALL>", "</TOOLCALL>", models="Nemotron Nano 2, Super 1.5", signs=(("<TOOLCALL>",),)
)
COHERE = marked_json(
    "cohere_command3",
    "<|START_ACTION|>",
    "<|END_ACTION|>",
    models="Command R7B, Command A",
    signs=(("<|START_ACTION|>",),),
    also=("cohere_command4",),
    keys=("tool_name", "parameters"),
)
INTERNLM = marked_json(
    "internlm",
    "<|action_start|><|plugin|>",
    "<|action_end|>",
    models="InternLM 2.5",
    signs=(("<|plugin|>",),),
    keys=("name", "parameters"),
    is_list=False,
)
GRANITE_20B = marked_json(
    "granite-20b-fc",
    "<function_call>",
    "",
    models="Granite 20B function calling",
    signs=(("<function_call>",),),
    is_list=False,
)
LONGCAT = marked_json(
    "longcat",
    "<longcat_tool_call>",
    "</longcat_tool_call>",
    models="LongCat Flash",
    signs=(("<longcat_tool_call>",),),
    is_list=False,
)
