"""Whatever a model of random logits writes under a schema and comes to an end is valid against it."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from typing import Any

import jsonschema
import pytest

from octavo.grammar import forms
from octavo.grammar.matchers import GrammarError, compile_matcher, normalised
from tests.grammar.schemas import SCHEMAS
from tests.grammar.walks import tokenizer, write
from tests.tiers import one_in

TEXTS_PER_SCHEMA = 3


def test_there_are_enough_schemas() -> None:
    assert len({json.dumps(schema) for schema in SCHEMAS}) >= 300


@one_in(2)
@pytest.mark.parametrize("index", range(len(SCHEMAS)))
def test_what_ends_is_valid(index: int) -> None:
    schema = SCHEMAS[index]
    rng = random.Random(index)
    texts = [write(forms.json_schema(schema), rng) for _ in range(TEXTS_PER_SCHEMA)]
    ended = [text for text in texts if text is not None]
    assert ended, "no text came to an end"
    for text in ended:
        value = json.loads(text)
        jsonschema.validate(value, schema, jsonschema.Draft202012Validator)


@pytest.mark.parametrize(
    ("keyword", "schema"),
    [
        ("not", {"not": {"type": "string"}}),
        ("if", {"if": {"type": "string"}, "then": {"minLength": 3}}),
        ("uniqueItems", {"type": "array", "uniqueItems": True}),
        ("contains", {"type": "array", "contains": {"type": "integer"}}),
        ("dependentRequired", {"dependentRequired": {"a": ["b"]}}),
        ("propertyNames", {"type": "object", "propertyNames": {"format": "email"}}),
        ("unevaluatedProperties", {"type": "object", "unevaluatedProperties": False}),
        ("oneOf", {"oneOf": [{"type": "integer"}, {"minimum": 2}]}),
        ("nested", {"type": "object", "properties": {"a": {"not": {}}}}),
        ("$ref", {"$ref": "http://example.com/schema"}),
        ("type", {"type": "text"}),
        ("minimum", {"type": "integer", "minimum": "x"}),
    ],
)
def test_what_is_not_supported_is_refused_by_name(keyword: str, schema: dict[str, Any]) -> None:
    with pytest.raises(GrammarError) as refused:
        compile_matcher(normalised(forms.grammar_text(forms.json_schema(schema))), tokenizer())
    message = str(refused.value)
    names = {"nested": "'not'", "$ref": "example.com", "type": "text", "minimum": "minimum"}
    assert names.get(keyword, f"'{keyword}'") in message
    assert "\n" not in message


@pytest.mark.parametrize(
    "expression",
    [
        "[a-z]{3}-[0-9]+",
        "(yes|no)!?",
        "\\d{4}-\\d{2}",
        "caf\u00e9+",
        "a.c",
        "^anchored$",
        'q"uote/slash',
        "(?i)case",
        "x|",
    ],
)
def test_an_expression_is_matched_as_a_whole(expression: str) -> None:
    rng = random.Random(expression)
    for _ in range(20):
        text = write(forms.regex(expression), rng)
        assert text is not None
        assert re.fullmatch(expression, text.decode())


def test_one_of_the_choices_is_made() -> None:
    choices = ["yes", "yesbut", "no", "\u4f60\u597d", 'a "quote"', "two\nlines"]
    rng = random.Random(0)
    made = {(write(forms.choice(choices), rng) or b"").decode() for _ in range(500)}
    assert made == set(choices)


def test_grammars_are_taken_as_gbnf_and_as_lark() -> None:
    rng = random.Random(0)
    for grammar in ('root ::= "(" root ")" | [0-9]+\n', 'start: "(" start ")" | /[0-9]+/'):
        for _ in range(20):
            text = (write(forms.grammar(grammar), rng) or b"").decode()
            assert re.fullmatch(r"\(*[0-9]+\)*", text)
            assert text.count("(") == text.count(")")


@pytest.mark.parametrize("name", ["google-datetime", "password", "binary", "uri-reference", "no-such-format"])
def test_an_unknown_format_is_an_annotation(name: str) -> None:
    for schema in ({"type": "string", "format": name, "maxLength": 3}, {"format": name}, {"items": {"format": name}}):
        normal = normalised(forms.grammar_text(forms.json_schema(schema)))
        compile_matcher(normal, tokenizer())
        assert name not in normal


@pytest.mark.parametrize("name", ["date", "time", "date-time", "duration", "uint32", "double"])
def test_a_format_says_nothing_about_other_types(name: str) -> None:
    assert write(forms.json_schema({"type": ["integer", "null"], "format": name}), random.Random(0)) is not None


DAYS = ("2024-02-29", "2000-02-29", "0000-02-29", "1904-02-29", "2023-12-31", "2023-04-30")
NO_DAYS = ("2023-02-29", "1900-02-29", "2023-04-31", "2023-13-01", "2023-00-10", "2023-1-1")
TIMES = ("23:59:59Z", "00:00:00.123456789+14:00", "12:30:45.1z")
NO_TIMES = ("24:00:00Z", "12:30:45", "12:30Z", "12:30:45.Z", "12:30:45.1234567890Z")
SPANS = ("P1Y", "P1Y2M3D", "PT1H", "P3DT4H5M6S", "P2W", "PT36H", "P1M", "PT0S")
NO_SPANS = ("P", "PT", "P1S", "P1Y2D", "P1W1D", "1Y", "P1DT", "P1.5Y", "P1234567890D")


@pytest.mark.parametrize(
    ("name", "taken", "refused"),
    [
        ("date", DAYS, NO_DAYS),
        ("time", TIMES, NO_TIMES),
        ("date-time", [f"{day}T{time}" for day in DAYS for time in TIMES], [f"{DAYS[0]}T{time}" for time in NO_TIMES]),
        ("duration", SPANS, NO_SPANS),
    ],
)
def test_formats_of_time(name: str, taken: Sequence[str], refused: Sequence[str]) -> None:
    for schema in ({"type": "string", "format": name}, {"type": "string", "format": name, "pattern": ".", "allOf": []}):
        matcher = compile_matcher(normalised(forms.grammar_text(forms.json_schema(schema))), tokenizer())
        for text in (*taken, *refused):
            tokens, fresh = list(json.dumps(text).encode()), matcher.deep_copy()
            is_taken = fresh.try_consume_tokens(tokens) == len(tokens) and fresh.is_accepting()
            assert is_taken == (text in taken), text


TEXTS = ("", "-", "+.", "7", "-0.50", ".5", "1e5", "a1", "abcd1", "ABCD1", "1x", "x", "(1)", "c", "xc", "b", "ab")


@pytest.mark.parametrize(
    "pattern",
    [
        r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$",  # pydantic's of a Decimal
        r"^(?=.*\d)(?=.*[a-z()|])(?:[a-z\d]{4,6}|..?)$",
        r"^(?=.*\))[(](\d|x)\)$",
        r"^(?=x).*(?:c|d)$",
    ],
)
def test_patterns_that_look_ahead_at_their_beginning(pattern: str) -> None:
    schema = {"type": "string", "pattern": pattern, "maxLength": 5}
    matcher = compile_matcher(normalised(forms.grammar_text(forms.json_schema(schema))), tokenizer())
    taken = []
    for text in TEXTS:
        tokens, fresh = list(json.dumps(text).encode()), matcher.deep_copy()
        if fresh.try_consume_tokens(tokens) == len(tokens) and fresh.is_accepting():
            taken.append(text)
    assert taken == [text for text in TEXTS if re.search(pattern, text)] != []


@pytest.mark.parametrize("pattern", ["^(?=a)b|c", "^(?=a|b).", "^(?!a)b", "^a(?=b)", "^(?=a", "^(?<=a)b"])
def test_other_patterns_that_look_ahead_are_refused(pattern: str) -> None:
    with pytest.raises(GrammarError):
        compile_matcher(normalised(forms.grammar_text(forms.json_schema({"pattern": pattern}))), tokenizer())


ENDLESS = [
    {},
    True,
    {"type": "number"},
    {"type": "integer"},
    {"type": "integer", "multipleOf": 7},
    {"type": "number", "minimum": 0, "maximum": 1},
    {"minimum": 0.5},
    {"type": ["number", "null"]},
    {"anyOf": [{"type": "number"}, {"type": "string", "maxLength": 3}]},
    {"$ref": "#/$defs/n", "$defs": {"n": {"type": "number", "exclusiveMinimum": 3}}},
    {"allOf": [{"type": "number"}, {"minimum": 1}]},
    {"title": "Answer", "description": "A number.", "type": "number"},
]


@pytest.mark.parametrize("schema", ENDLESS)
@pytest.mark.parametrize("letter", [b"1", b"0", b"."])
def test_a_number_ends_though_a_model_goes_on_writing_digits(schema: Any, letter: bytes) -> None:
    matcher = compile_matcher(normalised(forms.grammar_text(forms.json_schema(schema))), tokenizer())
    digits = [b"1", b"7", b".", b"3", *[letter, *(bytes([digit]) for digit in b"1234567890")] * 8]
    written = b""
    for digit in digits:
        if matcher.try_consume_tokens(list(digit)):
            written += digit
    assert len(written) < 45
    assert matcher.is_accepting(), written
    assert jsonschema.Draft202012Validator(schema).is_valid(json.loads(written)), written


@pytest.mark.parametrize("name", ["time", "date-time", "duration"])
def test_formats_have_a_longest_text(name: str) -> None:
    matcher = compile_matcher(
        normalised(forms.grammar_text(forms.json_schema({"type": "string", "format": name}))), tokenizer()
    )
    start = {"time": '"12:00:00.', "date-time": '"2024-01-01T12:00:00.', "duration": '"P'}[name]
    assert matcher.try_consume_tokens(list(start.encode())) == len(start)
    assert matcher.try_consume_tokens(list(b"1" * 40)) == 9
