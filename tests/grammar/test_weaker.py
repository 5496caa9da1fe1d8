"""A schema of a function that no grammar keeps to becomes a weaker one: what is valid can be written, still."""

from __future__ import annotations

import asyncio
import json
from functools import cache
from typing import Any

import jsonschema
import pytest

from octavo.grammar import forms, tester
from octavo.grammar.matchers import compile_matcher
from octavo.grammar.trial_queue import GrammarRefused, TrialQueue
from octavo.grammar.vocabulary import PackedVocabulary, pack_tokens
from octavo.system.child_worker import REFUSED, RENDERED
from tests.grammar.walks import VOCABULARY, tokenizer

Schema = dict[str, Any]

PLACE = "tools[0].function.parameters"
PACKED = PackedVocabulary(pack_tokens(VOCABULARY.tokens), VOCABULARY.special_ids, VOCABULARY.eos_ids)
TEXT: Schema = {"type": "string"}
A_AND_B: Schema = {"type": "object", "properties": {"a": {"type": "integer"}, "b": TEXT}}


@cache
def trial() -> tester.Tester:
    return tester.Tester(VOCABULARY)


def tried(schema: Schema, is_strict: bool = False) -> tuple[bytes, str]:
    return trial().serve(forms.grammar_text(forms.arguments(schema, PLACE, is_strict)))


def takes(grammar: str, instance: Any) -> bool:
    tokens, matcher = list(json.dumps(instance, ensure_ascii=False).encode()), compile_matcher(grammar, tokenizer())
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def with_a(schema: Schema) -> Schema:
    return {"type": "object", "properties": {"a": schema, "b": TEXT}, "required": ["a"]}


CASES: list[tuple[Schema, list[str], list[Any]]] = [
    (with_a({"type": "array", "uniqueItems": True}), [".properties.a.uniqueItems"],
     [{"a": [1, 2]}, {"a": [], "b": ""}]),
    (with_a({"not": {"type": "string"}}), [".properties.a.not"], [{"a": 1}, {"a": None, "b": "x"}]),
    (with_a({"type": "object", "propertyNames": {"format": "email"}}), [".properties.a.propertyNames"],
     [{"a": {"k": 1}}]),
    (with_a({"type": "string", "pattern": "^(?!x)[a-z]+$"}), [".properties.a.pattern"], [{"a": "abc"}]),
    (with_a({"type": "string", "pattern": r"(a)\1"}), [".properties.a.pattern"], [{"a": "aa"}]),
    (with_a({"type": "array", "contains": {"const": 1}, "minContains": 2}),
     [".properties.a.contains", ".properties.a.minContains"], [{"a": [1, 1]}]),
    (with_a({"$ref": "https://example.com/schema"}), [".properties.a.$ref"], [{"a": {"k": [1]}}]),
    (with_a({"$ref": "#/$defs/nowhere"}), [".properties.a.$ref"], [{"a": 1}]),
    (with_a({"type": "list"}), [".properties.a.type"], [{"a": [1]}]),
    (with_a({"type": "integer", "multipleOf": 2**40 + 1}), [".properties.a.multipleOf"], [{"a": 2**40 + 1}]),
    ({**A_AND_B, "minProperties": 1, "maxProperties": 2}, [".minProperties", ".maxProperties"],
     [{"a": 1}, {"a": 1, "b": ""}]),
    ({**A_AND_B, "if": {"required": ["a"]}, "then": {"required": ["c"]}}, [".if", ".then"],
     [{"b": ""}, {"c": 1, "a": 1}]),
    ({**A_AND_B, "dependentRequired": {"a": ["c"]}}, [".dependentRequired"], [{"c": 1, "a": 1}]),
    ({**A_AND_B, "dependentSchemas": {"a": {"properties": {"d": {"type": "null"}}}}}, [".dependentSchemas"],
     [{"d": None, "a": 1}]),
    ({**A_AND_B, "unevaluatedProperties": False}, [".unevaluatedProperties"], [{"a": 1, "b": ""}]),
    ({**A_AND_B, "unevaluatedProperties": {"type": "null"}}, [".unevaluatedProperties"], [{"a": 1, "c": None}]),
    (with_a({"oneOf": [{"type": "integer"}, {"type": "integer", "minimum": 2}]}), [".properties.a.oneOf"], [{"a": 1}]),
    (with_a({"oneOf": [{"const": "x", "not": {}}, {"const": "y"}]}), [".properties.a.oneOf[0].not"], [{"a": "y"}]),
    ({"type": "object", "patternProperties": {"^(?=x)": {"type": "integer"}}, "additionalProperties": False},
     [".patternProperties"], [{"xy": 1}]),
    ({"type": "object", "properties": {"a": {"$ref": "#/$defs/n"}},
      "$defs": {"n": {"type": "array", "uniqueItems": True}}}, [".$defs.n.uniqueItems"], [{"a": [1, 2]}]),
]  # fmt: skip


@pytest.mark.parametrize("index", range(len(CASES)))
def test_what_cannot_be_kept_to_is_left_out_and_named(index: int) -> None:
    schema, left_out, instances = CASES[index]
    kind, grammar = tried(schema)
    assert kind == RENDERED, grammar
    assert forms.weakened_in(grammar) == tuple(PLACE + place for place in left_out)
    for instance in instances:
        if "$ref" not in left_out[0] and ".type" not in left_out[0]:
            jsonschema.validate(instance, schema)
        assert takes(grammar, instance), instance
    assert not takes(grammar, [1])
    assert tried(schema, is_strict=True)[0] == REFUSED, "strict schemas are kept to or refused"


def test_what_can_be_kept_to_stays() -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer", "maximum": 9}, "b": {"not": {}}},
        "required": ["a"],
    }
    grammar = tried(schema)[1]
    assert takes(grammar, {"a": 9, "b": 1})
    assert not takes(grammar, {"a": 10})
    assert not takes(grammar, {"b": 1})
    assert tried({**schema, "properties": {"a": {"type": "array", "uniqueItems": False}}})[1].startswith('{"grammars"')


def message(*parts: forms.Part) -> str:
    start = " | ".join(f'"{index}" @t{index}' for index in range(len(parts)))
    return forms.grammar_text(
        forms.GrammarSource(f"({start})", parts={f"t{index}": part for index, part in enumerate(parts)})
    )


def compiled(*texts: str) -> list[Any]:
    async def inside() -> list[Any]:
        trials = TrialQueue(lambda: PACKED)
        try:
            return await asyncio.gather(*(trials.try_grammar(text) for text in texts), return_exceptions=True)
        finally:
            trials.close()

    return asyncio.run(inside())


def test_each_function_of_a_message_is_weakened_alone() -> None:
    patterns = [{"type": "string", "pattern": f"{c}.*{c}.{{1,30}}{c}"} for c in "abcdefghijklm"]
    schemas = [
        with_a({"type": "integer", "maximum": 9}),
        with_a({"type": "array", "uniqueItems": True}),
        with_a({"allOf": patterns}),
    ]
    parts = [forms.arguments(schema, f"tools[{index}]", False) for index, schema in enumerate(schemas)]
    (made,) = compiled(message(*parts))
    assert made.weakened == ("tools[1].properties.a.uniqueItems", "tools[2]")
    matcher = compile_matcher(made.form, tokenizer())
    for text, is_taken in [('0{"a":9}', True), ('0{"a":10}', False), ('1{"a":[1,1]}', True), ('2{"z":1}', True)]:
        fresh = matcher.deep_copy()
        tokens = list(text.encode())
        assert (fresh.try_consume_tokens(tokens) == len(tokens) and fresh.is_accepting()) == is_taken, text


def test_a_strict_function_is_not_weakened_by_another() -> None:
    unusable = with_a({"type": "array", "uniqueItems": True})
    parts = [forms.arguments(unusable, "tools[0]", True), forms.arguments(unusable, "tools[1]", False)]
    (made,) = compiled(message(*parts))
    assert isinstance(made, GrammarRefused)
    assert "'uniqueItems'" in str(made)
