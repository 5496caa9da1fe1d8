"""Every format: what it writes is read again, however it is cut, in time that is linear in the text."""

from __future__ import annotations

import json
import os
import random
from typing import Any

import pytest

from octavo.text.message_format import TOOL_FORMATS
from octavo.text.reader import Call, Format, MessageParser, Piece, Text
from octavo.text.tool_calls.harmony import HARMONY
from octavo.text.tool_calls.tool_format import ToolFormat
from octavo.text.tool_calls.values import text_of, type_of
from tests.text.tool_calls.messages import joined

NUM_CALLS = 200
NUM_CUT_EVERYWHERE = int(os.environ.get("OCTAVO_EXAMPLES", "5"))
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
        for key, given in json.loads(call.arguments).items():
            types = schemas[call.name]["properties"].setdefault(key, {"type": []})["type"]
            if type_of(given) not in types:
                types.append(type_of(given))
    return schemas


def parse(format: Format, texts: list[str], is_cut: bool = False) -> list[Piece]:
    parser = MessageParser(format)
    return joined([piece for text in texts for piece in parser.push(text)] + parser.finish(is_cut))


def same(pieces: list[Piece]) -> list[Any]:
    return [(p.name, json.loads(p.arguments)) if isinstance(p, Call) else p for p in pieces]


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
        assert same(parse(read, [text])) == expected, text
        whole = parse(read, [text])
        assert parse(read, list(text)) == whole, text
        everywhere = range(len(text)) if number < NUM_CUT_EVERYWHERE else [rng.randrange(len(text)) for _ in range(3)]
        for place in everywhere:
            assert parse(read, [text[:place], text[place:]]) == whole, text[:place]
