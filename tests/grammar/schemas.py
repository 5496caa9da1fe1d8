"""JSON schemas, made by combining what the keywords can say, and as tools and response formats have them."""

from __future__ import annotations

import itertools
from typing import Any

Schema = dict[str, Any]

STRINGS: list[Schema] = [
    {"type": "string"},
    {"type": "string", "maxLength": 5},
    {"type": "string", "minLength": 2, "maxLength": 4},
    {"type": "string", "minLength": 0, "maxLength": 0},
    {"type": "string", "pattern": "^[A-Z]{2}[0-9]{3}$"},
    {"type": "string", "pattern": "^x?ab+c"},
    {"type": "string", "pattern": "^(\\([0-9]{3}\\))?[0-9]{3}-[0-9]{4}$"},
    {"type": "string", "enum": ["red", "green", 'quo"te', "back\\slash", "\u00e9t\u00e9"]},
    {"const": "fixed"},
    *(
        {"type": "string", "format": name}
        for name in ("date", "time", "date-time", "uuid", "ipv4", "email", "hostname")
    ),
]
NUMBERS: list[Schema] = [
    {"type": "integer"},
    {"type": "integer", "minimum": 0, "maximum": 120},
    {"type": "integer", "minimum": -17, "maximum": -3},
    {"type": "integer", "exclusiveMinimum": 3, "exclusiveMaximum": 7},
    {"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 1000},
    {"type": "number"},
    {"type": "number", "minimum": -1.5, "maximum": 2.25},
    {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
    {"enum": [1, 2.5, -3]},
    {"const": 42},
]
OTHERS: list[Schema] = [
    {"type": "boolean"},
    {"type": "null"},
    {"const": None},
    {"enum": ["a", 1, None, True, {"k": [1]}, ["x"]]},
    {"type": ["string", "null"], "maxLength": 3},
    {"type": ["integer", "boolean"]},
    {"anyOf": [{"type": "integer"}, {"type": "string", "maxLength": 3}]},
    {"oneOf": [{"type": "integer"}, {"type": "boolean"}]},
]
SCALARS = [*STRINGS, *NUMBERS, *OTHERS]


def arrays() -> list[Schema]:
    sizes: list[Schema] = [{}, {"maxItems": 2}, {"minItems": 1, "maxItems": 3}, {"minItems": 2, "maxItems": 2}]
    made: list[Schema] = [
        {"type": "array", "items": item, **size} for item, size in zip(SCALARS, itertools.cycle(sizes), strict=False)
    ]
    made += [{"type": "array", "items": SCALARS[3], **size} for size in sizes]
    made += [
        {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "boolean"}], "items": False},
        {"type": "array", "prefixItems": [{"const": 1}], "items": {"type": "null"}, "minItems": 2, "maxItems": 4},
        {"type": "array", "items": {"type": "array", "items": {"type": "integer"}, "maxItems": 2}, "maxItems": 2},
    ]
    return made


def objects() -> list[Schema]:
    made: list[Schema] = []
    for index, (first, second) in enumerate(zip(SCALARS, SCALARS[7:] + SCALARS[:7], strict=True)):
        properties = {"first": first, "second": second, "with space": {"type": "boolean"}}
        required = [["first"], ["first", "second"], [], ["with space"]][index % 4]
        made.append({"type": "object", "properties": properties, "required": required, "additionalProperties": False})
        made.append({"type": "object", "properties": {"a": second}, "required": ["a"], "maxProperties": 1})
        made.append({"type": "object", "additionalProperties": first, "maxProperties": 2})
        made.append({"properties": {"a": first}, "required": ["a"], "additionalProperties": second, "maxProperties": 3})
    made += [
        {"type": "object"},
        {"type": "object", "maxProperties": 0},
        {"type": "object", "patternProperties": {"^n_": {"type": "integer"}}, "additionalProperties": False},
        {"type": "object", "properties": {'q"uote\\': {"type": "null"}}, "required": ['q"uote\\']},
        {"type": "object", "required": ["undeclared"], "maxProperties": 1},
    ]
    return made


def combined() -> list[Schema]:
    named = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 4}}, "required": ["name"]}
    aged = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}
    tree = {
        "type": "object",
        "properties": {
            "v": {"type": "integer"},
            "kids": {"type": "array", "items": {"$ref": "#/$defs/t"}, "maxItems": 1},
        },
        "required": ["v"],
        "additionalProperties": False,
    }
    made: list[Schema] = [
        {"allOf": [named, aged]},
        {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 9}]},
        {"anyOf": [{**named, "additionalProperties": False}, {**aged, "additionalProperties": False}]},
        {"$ref": "#/$defs/t", "$defs": {"t": tree}},
        {"$ref": "#/definitions/n", "definitions": {"n": {"type": "null"}}},
        {
            "oneOf": [
                {"type": "object", "properties": {"k": {"const": k}, "v": v}, "required": ["k"]}
                for k, v in (("a", {"type": "integer"}), ("b", {"type": "boolean"}))
            ]
        },
        {"title": "T", "description": "d", "default": 1, "examples": [1], "$comment": "c", "type": "integer"},
    ]
    for scalar in SCALARS:
        made.append({"anyOf": [scalar, {"type": "object", "properties": {"x": scalar}, "required": ["x"]}]})
        made.append({"type": "object", "properties": {"in": {"type": "object", "properties": {"x": scalar}}}})
    return made


def tools() -> list[Schema]:
    """Parameters of functions."""
    made: list[Schema] = []
    for first, second in itertools.combinations(SCALARS[:12], 2):
        made.append(
            {
                "type": "object",
                "properties": {
                    "query": {**first, "description": "What to look for"},
                    "options": {"type": "object", "properties": {"limit": second}, "additionalProperties": False},
                },
                "required": ["query"],
            }
        )
    return made


def names() -> list[Schema]:
    """Objects whose names are bound, as zod's records and pydantic's dictionaries of an enumeration are."""
    digits: Schema = {"type": "object", "additionalProperties": {"type": "integer", "minimum": 0, "maximum": 9}}
    first_two = {"a": {"type": "boolean"}, "b": {"type": "boolean"}}
    return [
        {**digits, "propertyNames": {"type": "string"}},
        {**digits, "propertyNames": {"type": "string", "enum": ["a", "b"]}, "required": ["a", "b"]},
        {**digits, "propertyNames": {"const": "a"}},
        {**digits, "propertyNames": {"$ref": "#/$defs/k"}, "$defs": {"k": {"enum": ["x", "y"], "title": "K"}}},
        {**digits, "propertyNames": {"pattern": "^k[0-9]$"}, "maxProperties": 3},
        {**digits, "propertyNames": {"minLength": 1, "maxLength": 3}, "minProperties": 1, "maxProperties": 1},
        {
            "type": "object",
            "properties": first_two,
            "propertyNames": {"enum": ["a", "c"]},
            "additionalProperties": False,
        },
        {"allOf": [{"properties": first_two, "required": ["a"]}, {"propertyNames": {"pattern": "^[ab]$"}}]},
    ]


SCHEMAS = [*SCALARS, *arrays(), *objects(), *combined(), *tools(), *names()]
