"""Closes the objects of a JSON schema: where ``properties`` are listed, no others are allowed.

JSON Schema allows properties that are not listed, so a model can add properties until its tokens run out. A schema
that states what else is allowed, by one of ``SAYS``, is unchanged.

All schemas that describe the same object are closed together: those in ``allOf`` and behind ``$ref`` are not closed one
by one, because each would then forbid what the others list.
https://json-schema.org/understanding-json-schema/reference/object#extending
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from octavo.grammar.subschemas import ANNOTATIONS, Schema, target_of

SAYS = ("additionalProperties", "patternProperties", "unevaluatedProperties")
ALTERNATIVES = ("anyOf", "oneOf")
IN_PLACE = ("$ref", "allOf", *ALTERNATIVES)
"""Keywords whose schemas apply to the same value."""
WITHIN = ("items", "prefixItems", "additionalItems", "additionalProperties", *ALTERNATIVES, "allOf")
"""Keywords with a schema or a list of schemas; ``properties`` and ``patternProperties`` have one per name."""


def closed(schema: Schema) -> Schema:
    """The same schema with closed objects. Referenced definitions get a closed copy in ``$defs``."""
    return _Closing(schema).run()


@dataclass
class _Listed:
    """Properties listed by all schemas of one value."""

    names: dict[str, bool] = field(default_factory=dict)
    """Names in order; the value says whether the property may be an object with listed properties too."""
    lists: bool = False
    """Whether any of the schemas has ``properties``."""
    says: bool = False
    """Whether any of the schemas has one of the keywords ``SAYS``."""
    is_mixed: bool = False
    """Whether two schemas describe objects under the same property, which must be closed together."""

    def add(self, other: _Listed, is_alternative: bool = False) -> None:
        self.lists |= other.lists
        self.says |= other.says
        self.is_mixed |= other.is_mixed
        for name, is_object in other.names.items():
            self.is_mixed |= is_object and self.names.get(name, False) and not is_alternative
            self.names[name] = is_object or self.names.get(name, False)


class _Closing:
    """State of closing one schema."""

    def __init__(self, root: Schema) -> None:
        self._root = root
        self._copies: dict[tuple[str, str], str] = {("#", "closed"): "#"}
        """References to the copies made, by original reference and kind of copy."""
        self._pending: list[tuple[str, Schema, Literal["closed", "open"]]] = []

    def run(self) -> Schema:
        result = self._close(self._root)
        made = {}
        while self._pending:
            name, schema, how = self._pending.pop()
            made[name] = self._close(schema) if how == "closed" else self._inside(schema)
        return {**result, "$defs": {**self._definitions(), **made}} if made else result

    def _definitions(self) -> Schema:
        found = self._root.get("$defs")
        return found if isinstance(found, dict) else {}

    def _close(self, schema: Any) -> Any:
        """A closed copy of ``schema``, which alone describes its value."""
        if not isinstance(schema, dict):
            return schema
        beyond = [key for key in (*IN_PLACE, "properties", "required", *SAYS) if key in schema]
        if beyond == ["$ref"]:
            return {**schema, "$ref": self._reference(schema["$ref"], "closed")}
        if beyond == ["allOf"] and isinstance(schema["allOf"], list) and len(schema["allOf"]) == 1:
            return {**schema, "allOf": [self._close(schema["allOf"][0])]}
        listed = self._listed(schema)
        if listed.is_mixed:
            return schema
        choices = [key for key in ALTERNATIVES if isinstance(schema.get(key), list)]
        result = {**schema, **self._inside({key: value for key, value in schema.items() if key not in choices})}
        for key in choices:
            others = self._listed({name: value for name, value in schema.items() if name != key})
            result[key] = [self._close_choice(each, others) for each in schema[key]]
        return result if choices else narrowed(_sealed(result, listed))

    def _close_choice(self, schema: Any, others: _Listed) -> Any:
        """A closed copy of one alternative of an object that also has the properties of ``others``."""
        if not others.lists:
            return self._close(schema)
        listed = self._listed(schema)
        listed.add(others)
        inside = self._inside(schema)
        sealed = _sealed({"allOf": [inside]}, listed)
        return sealed if "properties" in sealed else inside

    def _inside(self, schema: Any) -> Any:
        """``schema`` with the values nested in the one it describes closed; that value stays open."""
        if not isinstance(schema, dict):
            return schema
        result = dict(schema)
        for key in ("properties", "patternProperties"):
            if isinstance(schema.get(key), dict):
                result[key] = {name: self._close(value) for name, value in schema[key].items()}
        for key in WITHIN:
            make = self._inside if key in IN_PLACE else self._close
            value = schema.get(key)
            if isinstance(value, list):
                result[key] = [make(each) for each in value]
            elif isinstance(value, dict):
                result[key] = make(value)
        if "$ref" in schema:
            result["$ref"] = self._reference(schema["$ref"], "open")
        return result

    def _reference(self, reference: Any, how: Literal["closed", "open"]) -> Any:
        """A reference to a copy of the target of ``reference``; ``reference`` unchanged if it has no known target."""
        target = target_of(self._root, reference)
        if not isinstance(target, dict):
            return reference
        if (reference, how) not in self._copies:
            names = {*self._definitions(), *(made.rpartition("/")[2] for made in self._copies.values())}
            name = next(f"{how}{number}" for number in range(len(names) + 1) if f"{how}{number}" not in names)
            self._copies[reference, how] = f"#/$defs/{name}"
            self._pending.append((name, target, how))
        return self._copies[reference, how]

    def _listed(self, schema: Any, within: frozenset[str] = frozenset()) -> _Listed:
        """Properties listed by ``schema`` and all others of its value; ``within`` are the references that led here."""
        listed = _Listed()
        if not isinstance(schema, dict):
            return listed
        properties = schema.get("properties")
        if isinstance(properties, dict):
            listed.names = {name: _may_list(value) for name, value in properties.items()}
            listed.lists = True
        required = schema.get("required")
        for name in required if isinstance(required, list) else ():
            listed.names.setdefault(name, False)
        listed.says = any(key in schema for key in SAYS)
        reference = schema.get("$ref")
        if isinstance(reference, str) and reference not in within:
            target = target_of(self._root, reference)
            listed.says |= target is None
            listed.add(self._listed(target, within | {reference}))
        for each in _listed_in(schema, "allOf"):
            listed.add(self._listed(each, within))
        for key in ALTERNATIVES:
            found = _Listed()
            for each in _listed_in(schema, key):
                found.add(self._listed(each, within), is_alternative=True)
            listed.add(found)
        return listed


def _listed_in(schema: Schema, key: str) -> list[Any]:
    found = schema.get(key)
    return found if isinstance(found, list) else []


def _may_list(schema: Any) -> bool:
    return isinstance(schema, Mapping) and any(key in schema for key in ("properties", *IN_PLACE))


def _sealed(schema: Schema, listed: _Listed) -> Schema:
    """``schema`` restricted to the listed properties, unless it states which others are allowed."""
    least = schema.get("minProperties", 0)
    needs_others = isinstance(least, int | float) and least > len(listed.names)
    if not listed.lists or listed.says or needs_others:
        return schema
    own = schema.get("properties", {})
    return {
        **schema,
        "properties": {**own, **{name: True for name in listed.names if name not in own}},
        "additionalProperties": False,
    }


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
