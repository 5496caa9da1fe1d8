"""Names, arguments and values of calls as a model writes them, and the types that schemas give them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

from octavo.text.message_pieces import Call

MAX_NAME_LENGTH = 256
MAX_SCHEMA_DEPTH = 8
Schema = Mapping[str, Any]
Functions = Mapping[str, Schema | None] | frozenset[str]
"""The functions that may be called, with the schemas of their arguments as far as known."""


def is_name(name: Any) -> bool:
    """Whether a function may have this name."""
    return isinstance(name, str) and 0 < len(name) <= MAX_NAME_LENGTH and name.isprintable()


def make_call(name: Any, arguments: Any) -> Call | None:
    """A call; ``None`` if the name or the arguments, which must be a JSON object, are invalid."""
    if not is_name(name) or not isinstance(arguments, dict):
        return None
    try:
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        text.encode()
    except (ValueError, RecursionError):  # a number that JSON lacks, or an unpaired surrogate
        return None
    return Call(name, text)


def value_of(text: str) -> Any:
    """The value of JSON text; ``None``, which is not a call either, for invalid JSON."""
    try:
        return json.loads(text, parse_constant=_refuse, strict=False)
    except (ValueError, RecursionError):
        return None


def exact_value_of(text: str) -> Any:
    """The value of JSON text. Raises ``ValueError`` for other text, and for numbers that are too large for floats:
    many readers of JSON refuse them, and no writer has them."""
    return json.loads(text, parse_float=_finite, parse_constant=_refuse)


def _finite(text: str) -> float:
    return value if math.isfinite(value := float(text)) else _refuse(text)


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def text_of(value: Any) -> str:
    """JSON of a value."""
    return json.dumps(value, ensure_ascii=False)


def types_of(functions: Functions, name: str, key: str) -> frozenset[str]:
    """JSON types that the schema of function ``name`` allows for argument ``key``; empty if it says nothing."""
    root = functions.get(name) if isinstance(functions, Mapping) else None
    properties = root.get("properties") if root is not None else None
    schema = properties.get(key) if isinstance(properties, Mapping) else None
    return frozenset(_types(schema, root or {}, MAX_SCHEMA_DEPTH))


def _types(schema: Any, root: Schema, depth: int) -> Iterator[str]:
    if not isinstance(schema, Mapping) or not depth:
        return
    given = schema.get("type")
    if isinstance(given, str | list):
        yield from [given] if isinstance(given, str) else filter(lambda each: isinstance(each, str), given)
        return
    values = schema.get("enum", [schema["const"]] if "const" in schema else [])
    if isinstance(values, list) and values:
        yield from map(type_of, values)
        return
    if isinstance(schema.get("$ref"), str):
        yield from _types(_referred(schema["$ref"], root), root, depth - 1)
    for key in ("anyOf", "oneOf", "allOf"):
        given = schema.get(key)
        for each in given if isinstance(given, list) else ():
            yield from _types(each, root, depth - 1)


def _referred(reference: str, root: Schema) -> Any:
    """What a reference within the schema, such as ``#/$defs/x``, refers to."""
    found: Any = root
    for key in reference.removeprefix("#").strip("/").split("/"):
        found = found.get(key.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
    return found


def type_of(value: Any) -> str:
    """The JSON type of a value."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else "boolean"
    if isinstance(value, int | float):
        return "integer" if isinstance(value, int) else "number"
    return "string" if isinstance(value, str) else "array" if isinstance(value, list) else "object"
