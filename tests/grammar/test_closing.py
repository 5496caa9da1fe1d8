"""Objects that list their properties are closed, unless their schema says otherwise; the rest of it is left."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import pytest

from octavo.grammar import forms
from octavo.grammar.closing import MAX_OPTIONAL, MAX_SCHEMAS, closed
from octavo.grammar.matchers import compile_matcher, normalised
from tests.grammar.schemas import SCHEMAS
from tests.grammar.walks import tokenizer, write

NUMBER: dict[str, Any] = {"type": "integer", "minimum": 0, "maximum": 9}


def has(*names: str, **members: Any) -> dict[str, Any]:
    properties = {**dict.fromkeys(names, NUMBER), **members}
    return {"type": "object", "properties": properties, "required": list(properties)}


def defs(schema: dict[str, Any], **definitions: Any) -> dict[str, Any]:
    return {**schema, "$defs": definitions}


X = {"$ref": "#/$defs/X"}
CASES: dict[str, tuple[dict[str, Any], list[str], list[str]]] = {
    "flat": (has("a"), ['{"a": 1}'], ['{"a": 1, "b": 2}']),
    "no properties": ({"type": "object", "properties": {}}, ["{}"], ['{"a": 1}']),
    "free": ({"type": "object"}, ["{}", '{"a": 1}'], []),
    "nested": (has(o=has("a")), ['{"o": {"a": 1}}'], ['{"o": {"a": 1, "b": 2}}', '{"o": {"a": 1}, "b": 2}']),
    "items": ({"type": "array", "items": has("a")}, ['[{"a": 1}]'], ['[{"a": 1, "b": 2}]']),
    "prefix items": ({"type": "array", "prefixItems": [has("a")]}, ['[{"a": 1}]'], ['[{"a": 1, "b": 2}]']),
    "nullable": ({**has("a"), "type": ["object", "null"]}, ['{"a": 1}', "null"], ['{"a": 1, "b": 2}']),
    "definition": (defs(has(o=X), X=has("a")), ['{"o": {"a": 1}}'], ['{"o": {"a": 1, "b": 2}}']),
    "recursive": (
        {"type": "object", "properties": {"a": NUMBER, "next": {"$ref": "#"}}, "required": ["a"]},
        ['{"a": 1, "next": {"a": 2}}'],
        ['{"a": 1, "next": {"a": 2, "b": 3}}'],
    ),
    "escaped reference": (
        {"$ref": "#/definitions/a~1b%20c", "definitions": {"a/b c": has("a")}},
        ['{"a": 1}'],
        ['{"a": 1, "b": 2}'],
    ),
    "reference with a title": (defs({**X, "title": "T"}, X=has("a")), ['{"a": 1}'], ['{"a": 1, "b": 2}']),
    "one in allOf": (defs({"allOf": [X], "title": "T"}, X=has("a")), ['{"a": 1}'], ['{"a": 1, "b": 2}']),
    "allOf": ({"allOf": [has("a"), has("b")]}, ['{"a": 1, "b": 2}'], ['{"a": 1, "b": 2, "c": 3}']),
    "allOf and own": ({**has("c"), "allOf": [has("a")]}, ['{"c": 1, "a": 2}'], ['{"c": 1, "a": 2, "d": 3}']),
    "allOf of definitions": (
        defs({"allOf": [X, has("b")]}, X=has("a", o=has("q"))),
        ['{"a": 1, "o": {"q": 1}, "b": 2}'],
        ['{"a": 1, "o": {"q": 1}, "b": 2, "c": 3}', '{"a": 1, "o": {"q": 1, "r": 2}, "b": 2}'],
    ),
    "own beside a reference": (defs({**has("b"), **X}, X=has("a")), ['{"b": 1, "a": 2}'], ['{"b": 1, "a": 2, "c": 3}']),
    "the same object twice": (
        {"allOf": [has(o=has("a")), has(o=has("b"))]},
        ['{"o": {"a": 1, "b": 2}}'],
        [],
    ),
    "anyOf": (
        defs({"anyOf": [has("a"), X, {"type": "null"}]}, X=has("b")),
        ['{"a": 1}', '{"b": 1}', "null"],
        ['{"a": 1, "b": 2}', '{"b": 1, "c": 2}'],
    ),
    "anyOf and own": (
        {**has("k"), "anyOf": [has("a"), has("b")]},
        ['{"k": 1, "a": 2}', '{"k": 1, "b": 2}'],
        ['{"k": 1, "a": 2, "c": 3}', '{"k": 1, "a": 2, "b": 3}'],
    ),
    "anyOf of what is required": (
        {
            "type": "object",
            "properties": {"a": NUMBER, "b": NUMBER},
            "anyOf": [{"required": ["a"]}, {"required": ["b"]}],
        },
        ['{"a": 1}', '{"b": 1}', '{"a": 1, "b": 2}'],
        ['{"a": 1, "c": 3}', "{}"],
    ),
    "oneOf by a constant": (
        {
            "type": "object",
            "properties": {"k": {"type": "string"}},
            "oneOf": [has(k={"const": "x"}, a=NUMBER), has(k={"const": "y"}, b=NUMBER)],
        },
        ['{"k": "x", "a": 1}', '{"k": "y", "b": 1}'],
        ['{"k": "x", "a": 1, "b": 2}', '{"k": "x", "a": 1, "c": 2}'],
    ),
    "required and not listed": (
        {**has("a"), "required": ["a", "b"]},
        ['{"a": 1, "b": [2]}'],
        ['{"a": 1, "b": 2, "c": 3}'],
    ),
    "more than are listed": ({**has("a"), "minProperties": 2}, ['{"a": 1, "b": 2}'], []),
    "said to be open": ({**has("a"), "additionalProperties": True}, ['{"a": 1, "b": "x"}'], []),
    "said to be open within": (
        has(o={**has("a"), "additionalProperties": NUMBER}),
        ['{"o": {"a": 1, "b": 2}}'],
        ['{"o": {"a": 1}, "b": 2}'],
    ),
    "said to be open in allOf": (
        {"allOf": [has("a"), {**has("b"), "additionalProperties": True}]},
        ['{"a": 1, "b": 2, "c": 3}'],
        [],
    ),
    "patterns": ({**has("a"), "patternProperties": {"^x": NUMBER}}, ['{"a": 1, "x1": 2, "b": 3}'], []),
}


def takes(schema: dict[str, Any], text: str) -> bool:
    matcher = compile_matcher(normalised(forms.grammar_text(forms.json_schema(schema))), tokenizer())
    return bool(matcher.consume_tokens(list(text.encode())) and matcher.is_accepting())


@pytest.mark.parametrize("name", CASES)
def test_only_what_is_listed_may_be_written(name: str) -> None:
    schema, right, wrong = CASES[name]
    for text in right:
        assert takes(schema, text), text
        jsonschema.validate(json.loads(text), schema, jsonschema.Draft202012Validator)
        jsonschema.validate(json.loads(text), closed(schema), jsonschema.Draft202012Validator)
    for text in wrong:
        assert not takes(schema, text), text
        if text != "{}":
            jsonschema.validate(json.loads(text), schema, jsonschema.Draft202012Validator)


def test_closing_leaves_the_schema_as_it_was() -> None:
    for schema, _, _ in CASES.values():
        before = json.dumps(schema)
        closed(schema)
        assert json.dumps(schema) == before


def test_a_trial_changes_a_schema_once() -> None:
    """The engine reads what the trial made of it."""
    for schema in [*SCHEMAS[::20], *(case[0] for case in CASES.values())]:
        text = normalised(forms.grammar_text(forms.json_schema(schema)))
        assert normalised(text) == text


@pytest.mark.parametrize(
    "schema", [{"properties": 3}, {"allOf": 1}, {"$ref": 5}, {"$ref": "#/$defs/a/0"}, {"items": []}]
)
def test_a_schema_that_is_none_is_left_to_the_compiler(schema: dict[str, Any]) -> None:
    assert closed(schema) == schema or closed(schema) == {**schema, "additionalProperties": False}


def wide(count: int, *kinds: dict[str, Any]) -> dict[str, Any]:
    properties = {f'p.{i}+"\\/-\u00e9': kinds[i % len(kinds)] for i in range(count)}
    return {"type": "object", "properties": properties, "required": list(properties)[:2]}


def test_an_object_with_many_optional_properties() -> None:
    schema = wide(300, NUMBER, {"type": "string", "description": "d"}, {"type": "string", "title": "t", "maxLength": 3})
    made = closed(schema)
    assert len(made["patternProperties"]) == 3
    assert made["maxProperties"] == 300
    names = list(schema["properties"])
    whole = {names[0]: 1, names[1]: "x", names[299]: "abc", names[3]: 4}
    assert takes(schema, json.dumps(whole, ensure_ascii=False))
    assert not takes(schema, json.dumps({**whole, "q": 1}))
    assert not takes(schema, json.dumps({**whole, names[5]: "abcd"}, ensure_ascii=False))
    assert not takes(schema, json.dumps({names[0]: 1, names[3]: 4}, ensure_ascii=False)), "a required one is missing"
    written = [write(forms.json_schema(schema), random.Random(seed), 2000) for seed in range(4)]
    for text in filter(None, written):
        jsonschema.validate(json.loads(text), schema, jsonschema.Draft202012Validator)


def test_an_object_with_few_optional_properties_or_many_schemas_keeps_their_order() -> None:
    assert "patternProperties" not in closed(wide(MAX_OPTIONAL + 2, NUMBER))
    assert "patternProperties" in closed(wide(MAX_OPTIONAL + 3, NUMBER))
    kinds = [{"type": "string", "maxLength": length} for length in range(MAX_SCHEMAS + 1)]
    assert "patternProperties" not in closed(wide(200, *kinds))


def test_blanks_are_bounded() -> None:
    pretty = json.dumps({"a": 1, "o": {"b": 2, "c": 3}}, indent=4)
    schema = has("a", o=has("b", "c"))
    for text in (pretty, pretty.replace("\n", "\r\n"), json.dumps(json.loads(pretty), separators=(",", ":"))):
        assert takes(schema, text)
    assert takes(schema, json.dumps(json.loads(pretty), indent="\t"))
    for blanks in ("\n\n", "  ", "\n" + " " * 41, "\t", "\n \n"):
        assert not takes(schema, pretty.replace("\n    ", blanks, 1)), repr(blanks)
