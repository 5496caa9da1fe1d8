"""Whatever a model of random logits writes under a schema and comes to an end is valid against it."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import jsonschema
import pytest

from octavo.grammar import forms
from octavo.grammar.matchers import GrammarError, compile_matcher, normalised
from tests.grammar.schemas import SCHEMAS
from tests.grammar.walks import tokenizer, write

TEXTS_PER_SCHEMA = 3


def test_there_are_enough_schemas() -> None:
    assert len({json.dumps(schema) for schema in SCHEMAS}) >= 300


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
        ("propertyNames", {"type": "object", "propertyNames": {"pattern": "^a"}}),
        ("unevaluatedProperties", {"type": "object", "unevaluatedProperties": False}),
        ("oneOf", {"oneOf": [{"type": "integer"}, {"minimum": 2}]}),
        ("nested", {"type": "object", "properties": {"a": {"not": {}}}}),
        ("format", {"type": "string", "format": "no-such-format"}),
        ("$ref", {"$ref": "http://example.com/schema"}),
        ("type", {"type": "text"}),
        ("minimum", {"type": "integer", "minimum": "x"}),
    ],
)
def test_what_is_not_supported_is_refused_by_name(keyword: str, schema: dict[str, Any]) -> None:
    with pytest.raises(GrammarError) as refused:
        compile_matcher(normalised(forms.grammar_text(forms.json_schema(schema))), tokenizer())
    message = str(refused.value)
    names = {"nested": "'not'", "format": "no-such-format", "$ref": "example.com", "type": "text", "minimum": "minimum"}
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
