"""Keywords of JSON schemas as patterns, which llguidance knows: formats, names of properties, looking ahead."""

from __future__ import annotations

import re
from typing import Any

from octavo.grammar.subschemas import ANNOTATIONS, Schema, mapped, target_of

_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)"
_DATE = (
    f"(?:[0-9]{{4}}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    f"|02-(?:0[1-9]|1[0-9]|2[0-8]))|{_LEAP_YEAR}-02-29)"
)
_TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,9})?(?:[zZ]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_N = "[0-9]{1,9}"
_DAYS = f"(?:{_N}Y(?:{_N}M(?:{_N}D)?)?|{_N}M(?:{_N}D)?|{_N}D)"
_HOURS = f"T(?:{_N}H(?:{_N}M(?:{_N}S)?)?|{_N}M(?:{_N}S)?|{_N}S)"

PATTERNS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}[tT]{_TIME}",
    "duration": f"P(?:{_DAYS}(?:{_HOURS})?|{_HOURS}|{_N}W)",
}
"""RFC 3339, with bounded numbers of digits, and without leap seconds, which few libraries read."""
KNOWN = frozenset(("email", "hostname", "ipv4", "ipv6", "uri", "uuid"))
"""Formats that llguidance keeps to."""


def with_formats(schema: Any) -> Any:
    """``schema`` with patterns in place of the formats in ``PATTERNS``, and without what has no effect."""
    return mapped(schema, _with_format)


def _with_format(schema: Schema, path: str) -> Schema:
    result = {key: value for key, value in schema.items() if key not in ANNOTATIONS}
    if result.get("uniqueItems") is False:
        del result["uniqueItems"]
    if isinstance(pattern := result.get("pattern"), str) and len(parts := _without_lookahead(pattern)) > 1:
        del result["pattern"]
        others = result.get("allOf")
        result["allOf"] = [*(others if isinstance(others, list) else []), *({"pattern": part} for part in parts)]
    name = result.get("format")
    if not isinstance(name, str) or name in KNOWN:
        return result
    del result["format"]
    if name in PATTERNS:
        pattern = f"^{PATTERNS[name]}$"
        if "pattern" not in result:
            return {**result, "pattern": pattern}
        others = result.get("allOf")
        result["allOf"] = [*(others if isinstance(others, list) else []), {"pattern": pattern}]
    return result


def with_names(schema: Any) -> Any:
    """``schema`` with ``propertyNames`` in the keywords that llguidance knows, where that can be said in them.

    Names of a list become properties, and those of a pattern or a length a pattern of properties.
    """
    return mapped(schema, lambda found, _: _with_names(found, schema))


def _with_names(schema: Schema, root: Schema) -> Schema:
    names = schema.get("propertyNames", False)
    if isinstance(names, dict) and "$ref" in names:
        names = target_of(root, names["$ref"]) if len(names.keys() - ANNOTATIONS) == 1 else False
    if isinstance(names, dict):
        is_any = names.get("type", "string") == "string"
        names = {key: value for key, value in names.items() if key not in ANNOTATIONS and (key != "type" or not is_any)}
    result = {key: value for key, value in schema.items() if key != "propertyNames"}
    others, listed = schema.get("additionalProperties", True), schema.get("properties", {})
    if names in (True, {}):
        return result
    if not isinstance(names, dict) or not isinstance(listed, dict) or "patternProperties" in schema:
        return schema
    if (found := _listed_names(names)) is not None:
        properties = {name: listed.get(name, others) for name in found if name in listed or others is not False}
        return {**result, "properties": properties, "additionalProperties": False}
    if listed or (pattern := _name_pattern(names)) is None:
        return schema
    return {**result, "patternProperties": {pattern: others}, "additionalProperties": False}


def _listed_names(names: Schema) -> list[str] | None:
    """The only names that ``names`` allows; ``None`` if it does not list them."""
    found = [names["const"]] if names.keys() == {"const"} else names.get("enum") if names.keys() == {"enum"} else None
    return [name for name in found if isinstance(name, str)] if isinstance(found, list) else None


def _name_pattern(names: Schema) -> str | None:
    """A pattern for all that ``names`` allows; ``None`` if it says something else."""
    if names.keys() == {"pattern"} and isinstance(names["pattern"], str):
        return names["pattern"]
    least, most = names.get("minLength", 0), names.get("maxLength", "")
    if names.keys() - {"minLength", "maxLength"} or not isinstance(least, int) or not isinstance(most, int | str):
        return None
    return f"^[\\s\\S]{{{least},{most}}}$"


_PARTS = re.compile(r"\\.|\[(?:\\.|[^\]\\])*\]|[()|]", re.DOTALL)
_ONLY = re.compile(r"\^?\[([^\]\\^][^\]\\]*)\]\*\$")


def _without_lookahead(pattern: str) -> list[str]:
    """Patterns that all match where ``pattern`` does: what it looks ahead for at its beginning, and the rest.

    Of what must not come, only ``(?!^[...]*$)`` is understood, as in pydantic's pattern of a ``Decimal``: another
    character must come. A pattern that has other forms is returned as it is.
    """
    parts, rest = list[str](), pattern.removeprefix("^")
    while pattern.startswith("^") and rest.startswith(("(?=", "(?!")):
        kind, rest = rest[:3], rest[3:]
        inner, rest = rest[: (end := _end(rest))], rest[end:]
        only = _ONLY.fullmatch(inner)
        if not rest.startswith(")") or (kind == "(?!" and only is None):
            return [pattern]
        parts.append(f"[^{only[1]}]" if kind == "(?!" and only else f"^(?:{inner})")
        rest = rest[1:]
    return [*parts, f"^{rest}"] if parts and _end(rest) == len(rest) else [pattern]


def _end(pattern: str) -> int:
    """Where the first alternative of ``pattern``, or the group whose inside it begins with, ends."""
    depth = 0
    for found in _PARTS.finditer(pattern):
        depth += {"(": 1, ")": -1}.get(found[0], 0)
        if depth < 0 or (depth == 0 and found[0] == "|"):
            return found.start()
    return len(pattern)
