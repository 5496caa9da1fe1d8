"""Numbers of any size in a schema are kept to exactly, or refused by name; arbitrary precision is the judge."""

from __future__ import annotations

import json
import random
import re
from decimal import Decimal
from functools import cache
from typing import Any

import jsonschema
import pytest
from llguidance import LLMatcher

from octavo.grammar import forms
from octavo.grammar.matchers import GrammarError, compile_matcher, normalised
from octavo.grammar.number_ranges import Bound, integer_range, number_range
from tests.grammar.walks import tokenizer, write
from tests.tiers import one_in

Schema = dict[str, Any]

EDGES = (2**31, 2**53, 2**63, 2**64)
COUNT = 500


def is_number(checker: Any, value: Any) -> bool:
    return isinstance(value, int | Decimal) and not isinstance(value, bool)


def is_integer(checker: Any, value: Any) -> bool:
    return is_number(checker, value) and value == int(value)


Validator = jsonschema.validators.extend(
    jsonschema.Draft202012Validator,
    type_checker=jsonschema.Draft202012Validator.TYPE_CHECKER.redefine_many(
        {"number": is_number, "integer": is_integer}
    ),
)


def read(text: str) -> Any:
    return json.loads(text, parse_float=Decimal)


def near(rng: random.Random) -> int:
    return rng.choice((-1, 1)) * (rng.choice(EDGES) + rng.randrange(-3, 4))


def ends(rng: random.Random) -> Schema:
    """Bounds on one side or both."""
    low, high = sorted((near(rng), near(rng)))
    made: Schema = {}
    if rng.random() < 0.8:
        made[rng.choice(("minimum", "exclusiveMinimum"))] = low - 2
    if rng.random() < 0.8 or not made:
        made[rng.choice(("maximum", "exclusiveMaximum"))] = high + 2
    return made


def value(rng: random.Random, depth: int = 2) -> Any:
    kind = rng.randrange(6 if depth else 4)
    if kind == 4:
        return [value(rng, depth - 1) for _ in range(rng.randrange(3))]
    if kind == 5:
        return {name: value(rng, depth - 1) for name in rng.sample("abc", rng.randrange(3))}
    return rng.choice((near(rng), near(rng), near(rng), "text", None, True, 5))


def leaf(rng: random.Random) -> Schema:
    return rng.choice(
        (
            lambda: {"const": value(rng)},
            lambda: {"enum": [value(rng) for _ in range(rng.randrange(1, 4))] + [near(rng)]},
            lambda: {"type": "integer", **ends(rng)},
            lambda: {"type": ["integer", "null"], **ends(rng)},
            lambda: {"type": "number", **ends(rng)},
            lambda: {"type": "integer", "format": "int64", "maximum": 2**63 - 1, "minimum": -(2**63)},
            lambda: {"type": "integer", "enum": [near(rng), near(rng)]},
            lambda: {"allOf": [{"type": "integer"}, ends(rng)]},
        )
    )()


def nested(rng: random.Random, depth: int = 2) -> Schema:
    if depth == 0:
        return leaf(rng)

    def inner() -> Schema:
        return nested(rng, depth - 1)

    plain: Schema = {"type": "string", "maxLength": 3}
    return rng.choice(
        (
            lambda: leaf(rng),
            lambda: {"type": "object", "properties": {"a": inner(), "b": plain}, "required": ["a"]},
            lambda: {"type": "object", "properties": {"a": inner(), "b": inner(), "c": plain}},
            lambda: {"type": "object", "required": ["x"], "additionalProperties": inner()},
            lambda: {"type": "array", "items": inner(), "minItems": rng.randrange(2), "maxItems": rng.randrange(1, 4)},
            lambda: {"type": "array", "prefixItems": [inner(), plain, inner()], "items": False, "minItems": 2},
            lambda: {"type": "array", "prefixItems": [plain], "items": inner(), "maxItems": 3},
            lambda: {"anyOf": [inner(), {"type": "null"}]},
            lambda: {"oneOf": [{"type": "object", "properties": {"a": inner()}, "required": ["a"]}, plain]},
        )
    )()


def document(rng: random.Random) -> Schema:
    """A schema that may refer to definitions."""
    if rng.random() < 0.7:
        return nested(rng)
    pair = {"a": {"$ref": "#/$defs/n"}, "b": {"type": "array", "items": {"$ref": "#/$defs/n"}, "maxItems": 2}}
    return {"type": "object", "properties": pair, "required": ["a"], "$defs": {"n": nested(rng, 1)}}


def numbers(schema: Any) -> list[int]:
    if isinstance(schema, dict):
        return [number for child in schema.values() for number in numbers(child)]
    if isinstance(schema, list):
        return [number for child in schema for number in numbers(child)]
    return [schema] if isinstance(schema, int) and not isinstance(schema, bool) else []


def matcher_of(schema: Schema) -> LLMatcher:
    return compile_matcher(normalised(forms.grammar_text(forms.json_schema(schema))), tokenizer())


def takes(matcher: LLMatcher, text: str) -> bool:
    tokens, fresh = list(text.encode()), matcher.deep_copy()
    return fresh.try_consume_tokens(tokens) == len(tokens) and fresh.is_accepting()


@one_in(3)
@pytest.mark.slow
@pytest.mark.parametrize("batch", range(10))
def test_what_ends_is_valid_in_arbitrary_precision(batch: int) -> None:
    num_written = 0
    for index in range(COUNT // 10):
        rng = random.Random(f"{batch} {index}")
        schema = document(rng)
        validator = Validator(schema)
        for text in (write(forms.json_schema(schema), rng) for _ in range(2)):
            if text is not None:
                num_written += 1
                validator.validate(read(text.decode()))
    assert num_written > COUNT // 10, "few texts came to an end"


def test_exactly_the_valid_numbers_are_taken() -> None:
    for index in range(100):
        rng = random.Random(index)
        schema = leaf(rng)
        matcher = matcher_of(schema)
        for number in {number + step for number in numbers(schema) for step in range(-2, 3)}:
            assert takes(matcher, str(number)) == Validator(schema).is_valid(number), (schema, number)


@cache
def decimals() -> list[Decimal]:
    rng = random.Random(0)
    whole = [Decimal(sign * edge + step) for edge in (0, 1, 10, 99, *EDGES) for sign in (1, -1) for step in (-1, 0, 1)]
    return whole + [number + Decimal(rng.randrange(-999, 999)) / 10 ** rng.randrange(1, 7) for number in whole]


def test_ranges_compare_digit_by_digit() -> None:
    rng = random.Random(1)
    for _ in range(200):
        low, high = sorted(rng.sample(decimals(), 2))
        first, last = Bound(low, rng.random() < 0.5), Bound(high, rng.random() < 0.5)
        expressions = number_range(first, last)
        whole = integer_range(int(low), int(high))
        assert whole is not None
        if expressions is None:
            assert low == high
            continue
        for number in [low, high, *rng.sample(decimals(), 20)]:
            is_inside = (number > low or (first.is_inside and number == low)) and (
                number < high or (last.is_inside and number == high)
            )
            assert all(re.fullmatch(each, f"{number:f}") for each in expressions) == is_inside, (first, last, number)
            assert bool(re.fullmatch(whole, str(int(number)))) == (int(low) <= int(number) <= int(high))


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"type": "integer", "multipleOf": 3, "minimum": 2**53 + 1}, "number 9007199254740993 together with"),
        ({"type": "integer", "multipleOf": 2**53 + 1}, "'multipleOf' with too many digits"),
        ({"multipleOf": 1e-12}, "'multipleOf' with too many digits"),
        ({"allOf": [{"multipleOf": 65537}, {"multipleOf": 65539}]}, "'multipleOf' with too many digits"),
        ({"properties": {"a": {"const": 2**64}}, "minProperties": 1}, "together with 'minProperties'"),
        ({"properties": {"a": {"const": 2**64}}, "not": {}}, "uses 'not'"),
        ({"const": 10**500}, "a number of more than 400 digits"),
        ({"type": "integer", "minimum": 10**60}, "its numbers are beyond"),
        ({"oneOf": [{"const": 2**64}, {"type": "integer"}]}, "schemas that are not plainly exclusive"),
        ({"type": "integer", "minimum": 2**63, "maximum": 2**63 - 1}, "no number is within its bounds"),
    ],
)  # fmt: skip
def test_what_cannot_be_kept_to_is_refused_by_name(schema: Schema, reason: str) -> None:
    with pytest.raises(GrammarError) as refused:
        matcher_of(schema)
    assert reason in str(refused.value)
    assert len(str(refused.value)) < 300


@pytest.mark.parametrize("number", [2**53 + 1, -(2**63), 2**64, 1e20, 1e60, 1.5e-10, 0.1, 123456789.123456789])
def test_constants_are_written_with_all_digits(number: float) -> None:
    for schema in ({"const": number}, {"properties": {"a": {"enum": [number]}}, "required": ["a"], "type": "object"}):
        text = write(forms.json_schema(schema), random.Random(0))
        assert text is not None
        Validator(schema).validate(read(text.decode())) if isinstance(number, int) else None
        (digits,) = re.findall(r"-?[0-9.]+", text.decode())
        assert Decimal(digits) == Decimal(repr(number))


@pytest.mark.parametrize("bound", [1.7976931348623157e308, 10**80, 2**64])
def test_a_bound_beyond_what_is_written_is_none(bound: float) -> None:
    for kind in ("integer", "number"):
        matcher = matcher_of({"type": kind, "maximum": bound, "minimum": -bound})
        assert takes(matcher, "0")
        assert takes(matcher, str(2**53 + 1))


def test_numbers_in_a_schema_within_lark_are_refused_where_they_would_be_rounded() -> None:
    for number in (2**53 + 1, -(2**63), -9223372036854775296):
        form = forms.grammar('start: %json {"const": ' + str(number) + "}")
        with pytest.raises(GrammarError, match="'%json' cannot keep to numbers above"):
            normalised(forms.grammar_text(form))
    normalised(forms.grammar_text(forms.grammar(f'start: "{2**64}"')))
