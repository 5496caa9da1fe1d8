"""Every format: what a message means, and that it means the same however it is cut."""

from __future__ import annotations

import json
import os
import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.text.message_parser import Call, MessageParser, Piece, Text
from tests.text.tool_calls.messages import CASES, FORMATS, content, parse
from tests.tiers import one_in

EXAMPLES = int(os.environ.get("OCTAVO_EXAMPLES", "150"))
MARKS = sorted(
    {mark for _, text, _ in CASES for mark in text.replace("<", "\0<").replace(">", ">\0").split("\0") if mark}, key=len
)


@pytest.mark.parametrize(("format", "text", "pieces"), CASES)
def test_what_a_message_means(format: str, text: str, pieces: list[Piece]) -> None:
    assert parse(format, [text]) == pieces


@pytest.mark.parametrize(("format", "text", "pieces"), CASES)
def test_it_means_the_same_character_by_character_and_cut_once_anywhere(
    format: str, text: str, pieces: list[Piece]
) -> None:
    assert parse(format, list(text)) == pieces
    for place in range(len(text)):
        assert parse(format, [text[:place], text[place:]]) == pieces


def texts_of(format: str) -> st.SearchStrategy[str]:
    """Parts of real messages, shuffled, cut short and with other things between them."""
    whole = [text for name, text, _ in CASES if name == format or name.endswith(format)] or [CASES[0][1]]
    snippets = st.one_of(
        st.sampled_from(whole),
        st.sampled_from(MARKS),
        st.sampled_from(
            ['{"name": "f", "arguments": {"a": 1}}', '{"', '"}', "{}", "[", "]", "\\", '\\"', " ", "\n", "; "]
        ),
        st.text(max_size=5),
    )
    cut = st.tuples(snippets, st.integers(0, 200)).map(lambda pair: pair[0][: pair[1]])
    return st.lists(st.one_of(snippets, cut), max_size=8).map("".join)


def cuts_of(text: str, rng: random.Random) -> list[str]:
    places = sorted(rng.randrange(len(text) + 1) for _ in range(rng.randrange(12)))
    return [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]


@one_in(3)
@pytest.mark.slow
@pytest.mark.parametrize("format", FORMATS)
def test_any_text_means_the_same_however_it_is_cut(format: str) -> None:
    @settings(max_examples=EXAMPLES, deadline=None, derandomize=True)
    @given(texts_of(format), st.integers(0, 2**32))
    def check(text: str, seed: int) -> None:
        rng = random.Random(seed)
        at_once = parse(format, [text])
        assert parse(format, cuts_of(text, rng)) == at_once
        for piece in at_once:
            if isinstance(piece, Call):
                assert piece.is_cut or isinstance(json.loads(piece.arguments), dict)
            else:
                assert piece.text

    check()


def test_arguments_whose_brackets_close_and_that_are_no_json_are_not_complete() -> None:
    arguments = '{"a": {"b" "c"}}'
    (call,) = parse("hermes", [f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>'])
    assert call == Call("f", arguments, is_cut=True)


def test_content_comes_as_soon_as_it_cannot_be_a_mark() -> None:
    parser = MessageParser(FORMATS["hermes"])
    assert parser.push("Hello") == [content("Hello")]
    assert parser.push(" there <tool") == [content(" there")]
    assert parser.push("s>") == [content(" <tools>")]


def test_reasoning_comes_as_it_is_written() -> None:
    parser = MessageParser(FORMATS["think"])
    assert parser.push("<think>One") == [Text("reasoning", "One")]
    assert parser.push(" two</") == [Text("reasoning", " two")]


@one_in(7)
@pytest.mark.slow
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(
    "mark",
    ["<tool_call>", '<tool_call>{"a": "', "[TOOL_CALLS]{", "<|python_tag|>{", "[", "{", '{"', "<think>", "<|channel|>"],
)
def test_hostile_text_costs_little(format: str, mark: str) -> None:
    started = time.process_time()
    text = mark * (60_000 // len(mark))
    parse(format, [text[place : place + 5] for place in range(0, len(text), 5)])
    assert time.process_time() - started < 5


def test_a_harmony_header_without_a_message_is_read_alike_however_it_is_cut() -> None:
    """It is waited for at the end, and no longer than a header can be: what is behind that is content."""
    for length, found in ((900, ""), (1100, "b" * 1100)):
        text = f"<|channel|>final<|message|>A<|end|><|start|>{'b' * length}"
        assert parse("harmony", [text]) == parse("harmony", list(text)) == [Text("content", "A" + found)]
