"""The structure of a JSON schema: where others are in it, and what a reference points at.

https://json-schema.org/draft/2020-12/json-schema-core
"""

from __future__ import annotations

import re
import urllib.parse
from collections.abc import Callable, Iterator, Mapping
from typing import Any

Schema = dict[str, Any]

MAPS = ("properties", "patternProperties", "dependentSchemas")
"""Keywords with a schema per name."""
DEFINITIONS = ("$defs", "definitions")
WITHIN = (
    *("items", "prefixItems", "additionalItems", "additionalProperties", "anyOf", "oneOf", "allOf", "not", "if"),
    *("then", "else", "contains", "propertyNames", "unevaluatedItems", "unevaluatedProperties"),
)
"""Keywords with a schema or a list of schemas."""
ANNOTATIONS = frozenset(
    ("$comment", "default", "deprecated", "description", "examples", "readOnly", "title", "writeOnly")
)

UNSUPPORTED = (
    *("$dynamicRef", "$recursiveRef", "contains", "dependencies", "dependentRequired", "dependentSchemas", "else"),
    *("if", "maxContains", "minContains", "not", "propertyNames", "then", "unevaluatedItems", "unevaluatedProperties"),
    "uniqueItems",
)
"""Keywords that no grammar keeps to."""


def subschemas(schema: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Each schema directly inside ``schema``, with the keyword that holds it; definitions are not among them."""
    for key in MAPS:
        if isinstance(schema.get(key), Mapping):
            yield from ((key, child) for child in schema[key].values())
    for key in WITHIN:
        value = schema.get(key)
        if isinstance(value, list):
            yield from ((key, child) for child in value)
        elif isinstance(value, Mapping):
            yield key, value


def reachable(schema: Any, root: Schema) -> Iterator[Mapping[str, Any]]:
    """``schema`` and each schema that describes its value or a part of it, behind references too; each once."""
    pending, seen = [schema], set[int]()
    while pending:
        found = pending.pop()
        if isinstance(found, Mapping) and id(found) not in seen:
            seen.add(id(found))
            yield found
            pending += [child for _, child in subschemas(found)]
            if "$ref" in found:
                pending.append(target_of(root, found["$ref"]))


def mapped(schema: Any, change: Callable[[Schema, str], Any], path: str = "") -> Any:
    """A copy of ``schema`` in which ``change`` has replaced every schema, those inside it first.

    ``change`` gets a copy and its path, such as ``.properties.a.anyOf[0]``.
    """
    if not isinstance(schema, Mapping):
        return schema
    result = dict(schema)
    for key in (*MAPS, *DEFINITIONS):
        if isinstance(schema.get(key), Mapping):
            result[key] = {name: mapped(child, change, f"{path}.{key}.{name}") for name, child in schema[key].items()}
    for key in WITHIN:
        value = schema.get(key)
        if isinstance(value, list):
            result[key] = [mapped(child, change, f"{path}.{key}[{place}]") for place, child in enumerate(value)]
        elif isinstance(value, Mapping):
            result[key] = mapped(value, change, f"{path}.{key}")
    return change(result, path)


def target_of(root: Schema, reference: Any) -> Any:
    """The value at a JSON pointer; ``None`` if it does not exist, and for other kinds of references."""
    if not isinstance(reference, str) or not re.match(r"#(/|$)", reference):
        return None
    found: Any = root
    for part in urllib.parse.unquote(reference[1:]).split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and name.isdecimal() and int(name) < len(found):
            found = found[int(name)]
        else:
            found = found.get(name) if isinstance(found, dict) else None
    return found
