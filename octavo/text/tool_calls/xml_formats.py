"""The families that write calls between tags (``xml_calls``), and the grammar of their calls."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from octavo.grammar.forms import WEAKENS, FormError, Part, json_schema, literal
from octavo.text.tool_calls.tool_format import Marks, ToolFormat, marked, one_of, repeated
from octavo.text.tool_calls.values import types_of
from octavo.text.tool_calls.xml_calls import Tags

DSML = "\uff5cDSML\uff5c"
"""A token of DeepSeek's that is a part of its tags."""
MAX_ARGUMENTS = 64
"""Limit of a constrained call to a function without a list of its arguments."""
DEFINITIONS = ("$defs", "definitions")


def _format(name: str, tags: Tags, *, models: str, signs: tuple[tuple[str, ...], ...], **more: Any) -> ToolFormat:
    # Models that leave the first tag out begin with that of a function.
    more_opens = (tags.function[0],) if tags.function[0] and not tags.is_section else ()
    whole = [tags.opens, tags.closes, tags.function[2], *tags.key, *tags.value]
    return ToolFormat(
        name=name,
        models=models,
        message=marked(tags.read_calls, tags.opens, *more_opens),
        rules=_rules(tags),
        opens=tags.opens,
        more_opens=more_opens,
        marks=(DSML,)
        if DSML in tags.opens
        else tuple(tag for tag in whole if tag.startswith("<") and tag.endswith(">")),
        signs=signs,
        write=tags.write,
        is_plain=True,
        argument_rules=_argument_rules(tags),
        **more,
    )


def _rules(tags: Tags) -> Callable[[Sequence[str], Marks, bool], str]:
    before, behind, end = tags.function
    line = literal("\n")

    def rules(names: Sequence[str], marks: Marks, parallel: bool) -> str:
        opens, closes = marks.lark(tags.opens), marks.lark(tags.closes)
        heads = [marks.lark(f"{before}{name}{behind}" + ("" if behind == "\n" else "\n")) for name in names]
        function = f"function: {one_of(heads, marks.lark(end) if end else '', 'a')}\n"
        if tags.is_section:
            rest = f"{line} {repeated('function', line, parallel)} {line} {closes}"
        elif before:
            rest = repeated(f"{line} function {line} {closes}", f"{line} {opens}", parallel)
        else:
            rest = repeated(f"function {closes}", f"{line} {opens}", parallel)
        return f"calls: {opens} rest\nrest: {rest}\n{function}"

    return rules


def _argument_rules(tags: Tags) -> Callable[[int, Part, Marks], tuple[str, dict[str, Part]]]:
    """One rule for each argument, in the order of the schema; those that are not required may be left out."""

    def rules(index: int, part: Part, marks: Marks) -> tuple[str, dict[str, Part]]:
        schema = part.get("schema", {})
        properties = schema.get("properties") or {}
        required = schema.get("required") or ()
        if not isinstance(properties, dict) or not isinstance(required, list | tuple):
            raise FormError("has 'properties' that are no object or 'required' that is no list")
        parts: dict[str, Part] = {}
        if "properties" in schema and not properties and not schema.get("additionalProperties"):
            return f'a{index}: ""\n', parts
        if not properties:
            head = _tag_rule(tags, marks, r"/[A-Za-z0-9_.\-]{1,64}/", False)
            return (
                f"a{index}: any{index}{{0,{MAX_ARGUMENTS}}}\nany{index}: {head} v{index} {literal(chr(10))}\n"
                + _text_rule(f"v{index}", tags, marks, {}),
                parts,
            )
        names, lines = [], ""
        for place, (key, given) in enumerate(properties.items()):
            name = f"{index}_{place}"
            types = types_of({"f": schema}, "f", key)
            is_string = not types or "string" in types
            head = _tag_rule(tags, marks, literal(key), is_string)
            lines += f"p{name}: {head} v{name} {literal(chr(10))}\n"
            if is_string:
                lines += _text_rule(f"v{name}", tags, marks, given if isinstance(given, dict) else {})
            else:
                definitions = {each: schema[each] for each in DEFINITIONS if each in schema}
                parts[f"j{name}"] = json_schema({**definitions, **given})
                if WEAKENS in part:
                    parts[f"j{name}"][WEAKENS] = f"{part[WEAKENS]}.properties.{key}"
                lines += f"v{name}: {_padding(tags)} @j{name} {_padding(tags)} {marks.lark(tags.value[1])}\n"
            names.append(f"p{name}" if key in required else f"p{name}?")
        return f"a{index}: {' '.join(names)}\n{lines}", parts

    return rules


def _padding(tags: Tags) -> str:
    return literal(tags.padding) if tags.padding else ""


def _tag_rule(tags: Tags, marks: Marks, key: str, is_string: bool) -> str:
    """Lark of what is before a value, without padding; ``key`` is Lark of the argument's name."""
    before, behind = tags.head("\0", is_string).split("\0")
    own = behind.removeprefix(tags.key[1]).removesuffix(tags.value[0])
    rest = [marks.lark(part) for part in (tags.key[1], own, tags.value[0]) if part]
    return " ".join([marks.lark(before), key, *rest])


def _text_rule(name: str, tags: Tags, marks: Marks, schema: dict[str, Any]) -> str:
    """Lark of a string without quotes, and of the tag behind it."""
    end = f"{_padding(tags)} {marks.lark(tags.value[1])}"
    choices = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(choices, list) and choices:
        texts = [choice if isinstance(choice, str) else json.dumps(choice, ensure_ascii=False) for choice in choices]
        return f"{name}: {_padding(tags)} ({' | '.join(map(literal, texts))}) {end}\n"
    low, high = schema.get("minLength", 0), schema.get("maxLength", "")
    is_limited = isinstance(low, int) and isinstance(high or 0, int) and (low or high != "")
    times = f"{{{low},{high}}}" if is_limited else "*"
    return f"{name}: {_padding(tags)} {name}_text\n" + marks.up_to(f"{name}_text", tags.padding + tags.value[1], times)


_FUNCTION = ("<function=", ">", "</function>")
_KEY, _VALUE = ("<parameter=", ">"), ("", "</parameter>")
QWEN3_CODER = _format(
    "qwen3_coder",
    Tags("<tool_call>", "</tool_call>", _FUNCTION, _KEY, _VALUE, padding="\n"),
    models="Qwen3-Coder, Qwen 3.5, Nemotron 3, Step 3.5, MiMo",
    signs=(("<tool_call>", "<function=", "<parameter="),),
    also=("qwen3_xml", "step3p5", "mimo"),
)
SEED_OSS = _format(
    "seed_oss",
    Tags("<seed:tool_call>", "</seed:tool_call>", _FUNCTION, _KEY, _VALUE),
    models="Seed-OSS",
    signs=(("<seed:tool_call>",),),
)
GLM = _format(
    "glm45",
    Tags("<tool_call>", "</tool_call>", ("", "\n", ""), ("<arg_key>", "</arg_key>"), ("<arg_value>", "</arg_value>")),
    models="GLM 4.5 to 5",
    signs=(("<tool_call>", "<arg_key>"),),
    also=("glm47",),
)


def _invoke(prefix: str, opens: str, **more: Any) -> Tags:
    return Tags(
        f"<{prefix}{opens}>",
        f"</{prefix}{opens}>",
        (f'<{prefix}invoke name="', '">', f"</{prefix}invoke>"),
        (f'<{prefix}parameter name="', '"'),
        (">", f"</{prefix}parameter>"),
        is_section=True,
        **more,
    )


MINIMAX_M2 = _format(
    "minimax_m2", _invoke("", "minimax:tool_call"), models="MiniMax M2", signs=(("<minimax:tool_call>",),)
)
DEEPSEEK_V32 = _format(
    "deepseek_v32",
    _invoke(DSML, "function_calls", tells_strings=True),
    models="DeepSeek V3.2",
    signs=((DSML, "function_calls"),),
)
DEEPSEEK_V4 = _format(
    "deepseek_v4", _invoke(DSML, "tool_calls", tells_strings=True), models="DeepSeek V4", signs=((DSML, "tool_calls"),)
)
