"""Rewrites objects with very many optional properties, which would make every mask within them slow.

A parser keeps an item for each optional property that may come next, and adding them takes time quadratic in their
number: 20 ms for 2,000. As patterns, all properties with the same schema are one item, and their names one automaton.
"""

from __future__ import annotations

import json
import re
from typing import Any

from octavo.grammar.subschemas import ANNOTATIONS

MAX_OPTIONAL = 128
"""Most optional properties that may stay in ``properties``."""
MAX_SCHEMAS = 32
"""Most distinct schemas among the optional properties; each is a pattern, and patterns are compared pairwise."""
_SPECIAL = re.compile(r"[\\^$.|?*+()\[\]{}/-]")


def narrowed(schema: dict[str, Any]) -> dict[str, Any]:
    """``schema`` unchanged or, with too many optional properties, with patterns in their place.

    The optional properties may then come in any order, and a name may come twice; JSON parsers keep the last one. A
    closed object limits their number to that of the listed ones.
    """
    properties, required = schema.get("properties"), schema.get("required", [])
    if not isinstance(properties, dict) or len(properties) <= MAX_OPTIONAL or not isinstance(required, list):
        return schema
    if any(key in schema for key in ("patternProperties", "minProperties", "maxProperties")):
        return schema
    needed = {name for name in required if isinstance(name, str)}
    groups: dict[str, list[str]] = {}
    for name, value in properties.items():
        if name not in needed:
            groups.setdefault(_without_annotations(value), []).append(name)
    num_optional = sum(map(len, groups.values()))
    if num_optional <= MAX_OPTIONAL or len(groups) > MAX_SCHEMAS:
        return schema
    result = {**schema, "properties": {name: value for name, value in properties.items() if name in needed}}
    result["patternProperties"] = {
        "^(" + "|".join(_SPECIAL.sub(r"\\\g<0>", name) for name in names) + ")$": json.loads(value)
        for value, names in groups.items()
    }
    if schema.get("additionalProperties") is False:
        result["maxProperties"] = num_optional + len(needed)
    return result


def _without_annotations(schema: Any) -> str:
    if isinstance(schema, dict):
        schema = {key: value for key, value in schema.items() if key not in ANNOTATIONS}
    return json.dumps(schema)
