"""String formats of JSON Schema: known ones are kept to, others are annotations.

https://json-schema.org/draft/2020-12/json-schema-validation section 7
"""

from __future__ import annotations

from typing import Any

from octavo.grammar.subschemas import ANNOTATIONS, Schema, mapped

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
