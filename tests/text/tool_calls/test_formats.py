"""Every format: what it writes is read again, however it is cut, in time that is linear in the text."""

from __future__ import annotations

import json
import os
import random
import re
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.grammar.matchers import compile_matcher, make_tokenizer, normalised
from octavo.server_settings import REASONING_PARSERS, TOOL_CALL_PARSERS
from octavo.text import reasoning
from octavo.text.message_format import (
    AUTO,
    HARMONY_NAME,
    TOOL_FORMATS,
    MessageConstraints,
    MessageFormat,
    Tool,
    find_format,
)
from octavo.text.message_parser import Call, CallProgress, Format, MessageParser, Piece, Text
from octavo.text.tool_calls.harmony import HARMONY
from octavo.text.tool_calls.hermes import HERMES
from octavo.text.tool_calls.kimi import KIMI
from octavo.text.tool_calls.marked_json import COHERE, GRANITE, PHI4
from octavo.text.tool_calls.pythonic import LFM2, OLMO3
from octavo.text.tool_calls.tool_format import Marks, ToolFormat
from octavo.text.tool_calls.values import text_of, type_of
from octavo.text.tool_calls.xml_calls import json_of
from octavo.text.tool_calls.xml_formats import GLM, MINIMAX_M2, QWEN3_CODER
from octavo_fleet.backends.vocabulary import byte_tokenizer
from tests.text.tool_calls.messages import joined
from tests.tiers import one_in

EOS = 256
NUM_CALLS = 200
KINDS = ("content", "reasoning")
NUM_CUT_EVERYWHERE = int(os.environ.get("OCTAVO_EXAMPLES", "2"))
"""Of these messages, how many are cut in every place; the others are cut in random places."""
NAMES = ("f", "get_weather", "a.b-c", "mcp__x__y")
PIECES = (
    "x",
    "\u00e9\u4f60",
    "\U0001f600",
    '"',
    "'",
    "\\",
    "{",
    "}",
    "[",
    "]",
    ",",
    ":",
    "\n",
    " ",
    "`",
    "null",
    "1",
    "<",
)


def string(rng: random.Random, marks: tuple[str, ...]) -> str:
    """Text with quotes, brackets and marks; a letter between them, so that no two make another one."""
    return "x".join(rng.choice(PIECES + marks) for _ in range(rng.randrange(6)))


def value(rng: random.Random, marks: tuple[str, ...], depth: int = 2) -> Any:
    kind = rng.randrange(8 if depth else 6)
    if kind < 3:
        return string(rng, marks)
    if kind < 6:
        return rng.choice((0, -1, 2**63, 2**53 + 1, 1.5, -2e-7, True, False, None))
    if kind == 6:
        return [value(rng, marks, depth - 1) for _ in range(rng.randrange(3))]
    return {string(rng, marks): value(rng, marks, depth - 1) for _ in range(rng.randrange(3))}


def calls_of(rng: random.Random, format: ToolFormat) -> list[Call]:
    marks = (*format.marks, "<think>", "</think>", "</parameter>", "```", "<tool_call>")
    calls = []
    for _ in range(rng.randrange(1, 3)):
        arguments = {f"key_{place}": value(rng, marks) for place in range(rng.randrange(4))}
        calls.append(Call(rng.choice(NAMES), text_of(arguments)))
    return calls


def functions_of(calls: list[Call]) -> dict[str, dict[str, Any]]:
    """Schemas in which every argument has the types that it has in ``calls``."""
    schemas: dict[str, dict[str, Any]] = {name: {"type": "object", "properties": {}} for name in NAMES}
    for call in calls:
        for key, value in json.loads(call.arguments).items():
            types = schemas[call.name]["properties"].setdefault(key, {"type": []})["type"]
            if type_of(value) not in types:
                types.append(type_of(value))
    return schemas


def parse(format: Format, texts: list[str], is_cut: bool = False) -> list[Piece]:
    parser = MessageParser(format)
    return joined([piece for text in texts for piece in parser.push(text)] + parser.finish(is_cut))


def same(pieces: list[Piece]) -> list[Any]:
    return [(p.name, json.loads(p.arguments)) if isinstance(p, Call) else p for p in pieces]


@one_in(3)
@pytest.mark.slow
@pytest.mark.parametrize("format", TOOL_FORMATS, ids=lambda format: format.name)
def test_what_is_written_is_read_again_however_it_is_cut(format: ToolFormat) -> None:
    rng = random.Random(format.name)
    for number in range(NUM_CALLS):
        calls = calls_of(rng, format)
        one_typed = all(len(s["type"]) == 1 for f in functions_of(calls).values() for s in f["properties"].values())
        if not one_typed:
            calls = calls[:1]
        read = format.read(functions_of(calls))
        before, after = ("I look.\n" if format.has_mark and format is not HARMONY else ""), rng.choice(("", "\nSo."))
        text = before + format.write(calls) + ("" if format is HARMONY else after)
        expected: list[Any] = [(call.name, json.loads(call.arguments)) for call in calls]
        expected = [Text("content", "I look.")] * bool(before) + expected
        expected += [Text("content", after)] * bool(after and format is not HARMONY)
        whole = parse(read, [text])
        assert same(whole) == expected, text
        assert parse(read, list(text)) == whole, text
        everywhere = range(len(text)) if number < NUM_CUT_EVERYWHERE else [rng.randrange(len(text))]
        for place in everywhere:
            assert parse(read, [text[:place], text[place:]]) == whole, text[:place]


@one_in(3)
@pytest.mark.slow
@pytest.mark.parametrize("format", TOOL_FORMATS, ids=lambda format: format.name)
def test_a_message_that_is_cut_has_the_calls_so_far(format: ToolFormat) -> None:
    arguments = {"a": 'x "y" <z>\n', "b": [1, {"c": None}], "d": "", "e": 2.5, "f": "last"}
    calls = [Call("f", text_of(arguments)), Call("get_weather", "{}")]
    read, text = format.read(functions_of(calls)), format.write(calls)
    whole = [call.arguments for call in parse(read, [text]) if isinstance(call, Call)]
    most = 0
    for end in range(len(text) + 1):
        pieces = parse(read, [text[:end]], is_cut=True)
        assert parse(read, list(text[:end]), is_cut=True) == pieces
        found = [piece for piece in pieces if isinstance(piece, Call)]
        for call, name, expected in zip(found, ("f", "get_weather"), whole, strict=False):
            assert call.name == name
            assert expected.startswith(call.arguments)
            assert call.is_cut or call.arguments == expected
        assert not any(call.is_cut for call in found[:-1])
        assert len(found) >= most, "a call was lost"
        most = len(found)
        assert not found or len(pieces) == len(found), f"a beginning of a call is content: {text[:end]!r}"
    assert most == 2


@pytest.mark.parametrize("format", TOOL_FORMATS, ids=lambda format: format.name)
def test_arguments_are_streamed_while_they_are_written(format: ToolFormat) -> None:
    call = Call("f", text_of({"a": "word " * 40}))
    parser = MessageParser(format.read(functions_of([call])))
    pieces = [piece for character in format.write([call]) for piece in parser.push(character)]
    pieces += parser.finish()
    progress = [piece for piece in pieces if isinstance(piece, CallProgress)]
    assert "".join(piece.text for piece in progress) == call.arguments
    if format.name not in ("pythonic", "lfm2", "olmo3"):  # a call in the syntax of Python comes whole
        assert len(progress) > 150


HOSTILE = ("{opens}", '{opens}{{"a": "', "{value}", "</think>", "<think>", "{call}", "x\n")
"""What a message repeats: marks, beginnings of calls, ends of values, calls."""


@one_in(7)
@pytest.mark.slow
@pytest.mark.parametrize("format", TOOL_FORMATS, ids=lambda format: format.name)
def test_time_is_linear_in_the_text(format: ToolFormat) -> None:
    """Twenty times the text takes some twenty times as long, character by character; quadratic would be 400."""
    call = Call("f", text_of({"a": "@", "b": [1]}))
    begin, value = format.write([call]).split("@")
    read = reasoning.after_thinking(format.read(functions_of([call])), False)
    for hostile in HOSTILE:
        unit = hostile.format(opens=format.opens, value=value, call=format.write([call]))
        for before in ("", begin, "<think>") if "call" in hostile or "opens" in hostile else ("", begin):
            times = []
            for size in (200, 4_000):
                text = before + unit * (size // len(unit))
                started = time.process_time()
                parse(read, list(text))
                times.append(time.process_time() - started)
            assert times[1] < 80 * max(times[0], 0.001), (hostile, before, times)


def test_every_name_of_a_parser_is_known() -> None:
    names = [name for format in TOOL_FORMATS for name in (format.name, *format.also)]
    assert sorted(TOOL_CALL_PARSERS) == sorted((AUTO, "none", *names))
    names = [name for family in reasoning.FAMILIES for name in family.names]
    assert sorted(REASONING_PARSERS) == sorted((AUTO, "none", HARMONY_NAME, *names))
    for name in TOOL_CALL_PARSERS[2:]:
        format = find_format(name, "none", None, {}).tools
        assert format is not None
        assert name in (format.name, *format.also)


@pytest.mark.parametrize("format", TOOL_FORMATS, ids=lambda format: format.name)
def test_a_template_that_shows_the_signs_of_a_format_chooses_it(format: ToolFormat) -> None:
    for signs in format.signs:
        assert find_format(AUTO, AUTO, "{{ tools }}" + " ".join(signs), {}).tools is format


@pytest.mark.parametrize(
    ("template", "opens"),
    [
        ("<think>\n</think>", "<think>"),
        ("content.split('</think>')", "<think>"),
        ("[THINK]hm[/THINK] and </think>", "[THINK]"),
        ("'<seed:think>' '</seed:think>'", "<seed:think>"),
        ("\u25c1think\u25b7 \u25c1/think\u25b7", "\u25c1think\u25b7"),
        ("<|START_THINKING|><|END_THINKING|><|START_RESPONSE|><|END_RESPONSE|>", "<|START_THINKING|>"),
        ("<|channel>thought\n<channel|>", "<|channel>thought"),
        ("<thought></thought>", "<thought>"),
        ("<mm:think></mm:think>", "<mm:think>"),
        ("<think></think><answer></answer>", "<think>"),
        ("between <think></think> and between <response></response>", "<think>"),
        ("'<think>' '</think>' '\\n<response>' '</response>'", "<think>"),
    ],
)
def test_marks_of_reasoning_are_those_of_the_template(template: str, opens: str) -> None:
    thinking = find_format(AUTO, AUTO, template, {}).thinking
    assert thinking is not None
    assert thinking.opens == opens
    read = reasoning.after_thinking(reasoning.content_only, False, thinking)
    before, after = thinking.answer or ("", "")
    text = f"{opens}Hm.{thinking.closes}\n{before}So.{after}"
    assert parse(read, list(text)) == [Text("reasoning", "Hm."), Text("content", "So.")]
    inside = reasoning.after_thinking(
        reasoning.content_only, reasoning.begins_inside(f"x{opens}\n", thinking), thinking
    )
    assert parse(inside, [f"Hm.{thinking.closes}So."]) == [Text("reasoning", "Hm."), Text("content", "So.")]
    assert find_format(AUTO, AUTO, "nothing of the kind", {}).thinking is None


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.sampled_from(("a", "b ", "\n", "`", "<think>", "</think>", "<tool_call>", "x")), max_size=12).map(
        "".join
    ),
    st.booleans(),
)
def test_reasoning_and_content_add_up_to_the_message(text: str, is_inside: bool) -> None:
    """But for marks of reasoning and blanks around them; what closes reasoning is not shown without what opens it."""
    read = reasoning.after_thinking(HERMES.read(frozenset()), is_inside)
    pieces = parse(read, list(text))
    assert parse(read, [text]) == pieces
    shown = {kind: "".join(p.text for p in pieces if isinstance(p, Text) and p.kind == kind) for kind in KINDS}
    bare = re.sub(r"</?think>|\s", "", text)
    assert re.sub(r"</?think>|\s", "", "".join(piece.text for piece in pieces if isinstance(piece, Text))) == bare
    assert "</think>" not in re.sub("<think>.*?</think>|`</think>", "", shown["content"], flags=re.DOTALL)
    assert "</think>" not in shown["reasoning"]
    at_once = joined(MessageParser(read).finish(text=text))
    assert re.sub(r"</?think>|\s", "", "".join(p.text for p in at_once if isinstance(p, Text))) == bare


SCHEMA = {
    "type": "object",
    "properties": {
        "s": {"type": "string"},
        "i": {"type": "integer"},
        "n": {"$ref": "#/$defs/number"},
        "b": {"type": ["boolean", "null"]},
        "o": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "l": {"type": "array", "items": {"type": "string"}},
        "e": {"enum": ["1", "2"]},
        "x": {},
    },
    "$defs": {"number": {"type": "number"}},
}


@pytest.mark.parametrize(
    ("key", "text", "expected"),
    [
        ("s", "1", "1"),
        ("s", "null", "null"),
        ("s", "", ""),
        ("s", "\n a \n", "\n a \n"),
        ("s", "</parameter>", "</parameter>"),
        ("s", "a</parameter>b</function>", "a</parameter>b</function>"),
        ("s", '"a"', '"a"'),
        ("i", "1", 1),
        ("i", "9007199254740993", 9007199254740993),
        ("i", "one", "one"),
        ("n", "1.50", 1.5),
        ("n", "2", 2),
        ("b", "true", True),
        ("b", "True", True),
        ("b", "None", None),
        ("o", "null", None),
        ("o", "nullable", "nullable"),
        ("o", "5", "5"),
        ("l", '["a", "b"]', ["a", "b"]),
        ("l", "['a', \"b\"]", ["a", "b"]),
        ("l", '[\n "a"\n]', ["a"]),
        ("e", "1", "1"),
        ("x", "1", 1),
        ("x", '{"a": [1]}', {"a": [1]}),
        ("x", "a: 1", "a: 1"),
        ("unknown", "[1", "[1"),
    ],
)
def test_a_value_between_tags_has_the_type_of_its_schema(key: str, text: str, expected: Any) -> None:
    message = f"<tool_call>\n<function=f>\n<parameter={key}>\n{text}\n</parameter>\n</function>\n</tool_call>"
    for texts in ([message], list(message)):
        (call,) = parse(QWEN3_CODER.read({"f": SCHEMA}), texts)
        assert isinstance(call, Call)
        assert json.loads(call.arguments) == {key: expected}
        assert type(json.loads(call.arguments)[key]) is type(expected)


EMPTY = [Call("f", "{}")]


@pytest.mark.parametrize(
    ("format", "text", "expected"),
    [
        (QWEN3_CODER, "<tool_call>\n<function=f>\n</function>\n</tool_call>", EMPTY),
        (QWEN3_CODER, "<tool_call><function=f></function>", EMPTY),
        (QWEN3_CODER, "<function=f>\n</function>\n</tool_call>", EMPTY),
        (QWEN3_CODER, "<tool_call>\n<function=f>", EMPTY),
        (QWEN3_CODER, "<tool_call><function=g><parameter=a>1", [Call("g", '{"a": 1}')]),
        (QWEN3_CODER, "<tool_call>\n<function=", [Text("content", "<tool_call>\n<function=")]),
        (QWEN3_CODER, "Write <function=NAME> here", [Text("content", "Write <function=NAME> here")]),
        (GLM, "<tool_call>f\n</tool_call>", EMPTY),
        (GLM, "<tool_call>f</tool_call>", EMPTY),
        (GLM, "<tool_call>f", EMPTY),
        (GLM, "<tool_call>g", [Text("content", "<tool_call>g")]),
        (GLM, "<tool_call>f<arg_key>a</arg_key><arg_value>x</arg_value></tool_call>", [Call("f", '{"a": "x"}')]),
        (
            MINIMAX_M2,
            '<minimax:tool_call><invoke name="f"></invoke></minimax:tool_call>So.',
            [*EMPTY, Text("content", "So.")],
        ),
        (KIMI, f"{KIMI.opens}<|tool_call_begin|>f<|tool_call_argument_begin|><|tool_call_end|>", EMPTY),
        (PHI4, 'functools[{"name": "f", "arguments": {}}]', EMPTY),
        (GRANITE, '<tool_call>[{"name": "f"}]', EMPTY),
        (OLMO3, "<function_calls>\nf()\ng(a=1)\n</function_calls>", [*EMPTY, Call("g", '{"a": 1}')]),
        (LFM2, "<|tool_call_start|>[f()]<|tool_call_end|>Done.", [*EMPTY, Text("content", "Done.")]),
        (COHERE, '<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "f", "parameters": {}}]<|END_ACTION|>', EMPTY),
    ],
)
def test_other_ways_to_write_calls(format: ToolFormat, text: str, expected: list[Piece]) -> None:
    read = format.read({"f": None})
    for place in range(len(text)):
        assert parse(read, [text[:place], text[place:]]) == expected


LIMITED = {
    "type": "object",
    "properties": {
        "s": {"type": "string", "maxLength": 3},
        "e": {"enum": ["one", "two"]},
        "n": {"type": "integer", "minimum": 1, "maximum": 9},
        "l": {"type": "array", "items": {"$ref": "#/$defs/word"}, "maxItems": 2},
        "t": {"type": ["string", "null"]},
    },
    "required": ["s", "n"],
    "additionalProperties": False,
    "$defs": {"word": {"type": "string", "enum": ["a", "b"]}},
}


@pytest.mark.parametrize("format", [f for f in TOOL_FORMATS if f.argument_rules], ids=lambda format: format.name)
@pytest.mark.parametrize("has_tokens", [False, True])
def test_a_grammar_keeps_to_the_schema_between_tags(format: ToolFormat, has_tokens: bool) -> None:
    tokenizer = byte_tokenizer(more_special=tuple(dict.fromkeys(format.marks)) if has_tokens else ())
    message = MessageFormat(format, None, Marks(tokenizer.special_ids_by_text()))
    constraints = MessageConstraints(None, [Tool("f", LIMITED)], is_parallel=True)
    grammar = normalised(message.grammar(constraints, ""))
    matchers = make_tokenizer(tokenizer.vocabulary((EOS,)))

    def allows(*arguments: dict[str, Any]) -> bool:
        text = format.write([Call("f", text_of(each)) for each in arguments])
        tokens = tokenizer.encode(text, add_special_tokens=False)
        matcher = compile_matcher(grammar, matchers)
        return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()

    good = {"s": "x<y", "e": "two", "n": 3, "l": ["a", "b"], "t": "</p"}
    assert allows(good)
    assert allows(good, {"s": "", "n": 9})
    for wrong in ({"s": "long"}, {"e": "three"}, {"n": 10}, {"n": "x"}, {"l": ["c"]}, {"l": ["a"] * 3}):
        assert not allows({**good, **wrong}), wrong
    assert not allows({"s": "x"})
    assert not allows({**good, "z": 1})
    nothing = MessageConstraints(None, [Tool("f", None)])
    grammar = normalised(message.grammar(nothing, ""))
    assert allows({})
    assert not allows({"a": 1})


@pytest.mark.parametrize("format", [f for f in TOOL_FORMATS if f.has_mark and f is not HARMONY], ids=lambda f: f.name)
def test_calls_at_the_end_of_reasoning_that_is_not_closed_are_calls(format: ToolFormat) -> None:
    calls = [Call("f", text_of({"a": 'x "y" <z>', "b": [1]})), Call("get_weather", "{}")]
    read = reasoning.after_thinking(format.read(functions_of(calls)), False)
    text = "<think>I call. " + format.write(calls)
    expected = [Text("reasoning", "I call. "), *calls]
    for more in ("", "\n"):
        assert same(parse(read, [text + more])) == same(expected)
        assert same(parse(read, list(text + more))) == same(expected)
    for more in ("</think>", "\n</think>So.", " Or not."):
        for texts in ([text + more], list(text + more)):
            assert not any(isinstance(piece, Call) for piece in parse(read, texts))
    assert parse(read, list(text), is_cut=True) == [Text("reasoning", text.removeprefix("<think>"))]


@pytest.mark.parametrize("text", ["1e999", "NaN", "-Infinity", "{'a': 1e999}", "[-1e999, None]"])
@pytest.mark.parametrize("types", [frozenset(), frozenset({"number"}), frozenset({"object"})])
def test_numbers_that_json_lacks_are_text(text: str, types: frozenset[str]) -> None:
    assert json.loads(json_of(text, types)) == text
