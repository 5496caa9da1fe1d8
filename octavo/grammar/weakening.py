"""Weaker schemas, for functions whose schema no grammar keeps to: all valid arguments stay valid, and some others are.

Each keyword that cannot be kept to is left out at its place, and its place reported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from octavo.grammar.exact_numbers import NUMERIC, TYPES
from octavo.grammar.subschemas import UNSUPPORTED, Schema, mapped, target_of

MAX_TRIALS = 64
"""Most parts of a schema that are compiled to see whether they are usable; further ones count as not."""
_SIZES = ("minProperties", "maxProperties")
_CONDITIONAL = ("then", "else", "dependentSchemas", "dependentRequired", "dependencies")
"""Keywords that may require properties beside those listed."""

Trial = Callable[[Schema], bool]
"""Whether a schema can be kept to."""


def weaker(schema: Schema, is_usable: Trial) -> tuple[Schema, list[str]]:
    """``schema`` without what cannot be kept to, and the places left out, such as ``.properties.a.uniqueItems``."""
    weakening = _Weakening(schema, is_usable)
    return mapped(schema, weakening.change), weakening.left_out


@dataclass
class _Weakening:
    root: Schema
    is_usable: Trial
    left_out: list[str] = field(default_factory=list)
    num_trials: int = 0

    def change(self, schema: Schema, path: str) -> Schema:
        """``schema``, a copy whose subschemas are changed already, without what cannot be kept to."""
        open_names = set(_names_of([schema.get(key) for key in _CONDITIONAL]))
        for key in UNSUPPORTED:
            if key in schema and not (key == "uniqueItems" and schema[key] is False):
                value = self._leave_out(schema, key, path)
                if key == "unevaluatedProperties" and value is not False:
                    schema.setdefault("additionalProperties", True)
        if open_names and isinstance(schema.get("properties"), Mapping):
            schema["properties"] = {**dict.fromkeys(sorted(open_names), True), **schema["properties"]}
        if "$ref" in schema and not self._has_target(schema["$ref"]):
            self._leave_out(schema, "$ref", path)
        if "type" in schema and not self._fits({"type": schema["type"]}):
            self._leave_out(schema, "type", path)
        if "pattern" in schema and not self._fits({"type": "string", "pattern": schema["pattern"]}):
            self._leave_out(schema, "pattern", path)
        for key in sorted(NUMERIC & set(schema)):
            if not self._fits({"type": "number", key: schema[key]}):
                self._leave_out(schema, key, path)
        self._change_object(schema, path)
        if "oneOf" in schema and not self._fits({"oneOf": schema["oneOf"]}):
            options = self._leave_out(schema, "oneOf", path)
            if "anyOf" not in schema and isinstance(options, list):
                schema["anyOf"] = options
        return schema

    def _change_object(self, schema: Schema, path: str) -> None:
        names = schema.get("patternProperties", {})
        if names and not self._fits({"type": "object", "patternProperties": dict.fromkeys(names, True)}):
            self._leave_out(schema, "patternProperties", path)
            schema["additionalProperties"] = True  # their names are not known any more
        if any(key in schema for key in _SIZES):
            keys = ("properties", "required", "additionalProperties", *_SIZES)
            own = {key: schema[key] for key in keys if key in schema}
            if isinstance(own.get("properties"), Mapping):
                own["properties"] = dict.fromkeys(own["properties"], True)
            if not self._fits({"type": "object", **own}):
                for key in _SIZES:
                    if key in schema:
                        self._leave_out(schema, key, path)

    def _leave_out(self, schema: Schema, key: str, path: str) -> Any:
        self.left_out.append(f"{path}.{key}")
        return schema.pop(key)

    def _has_target(self, reference: Any) -> bool:
        is_name = isinstance(reference, str) and reference.startswith("#") and not reference.startswith("#/")
        return is_name or target_of(self.root, reference) is not None

    def _fits(self, schema: Schema) -> bool:
        if schema.get("type") in TYPES and len(schema) == 1:
            return True
        self.num_trials += 1
        return self.num_trials <= MAX_TRIALS and self.is_usable(schema)


def _names_of(values: Any) -> Iterator[str]:
    """Names of properties that schemas list or require, and those in lists of ``dependentRequired``."""
    if isinstance(values, Mapping):
        properties = values.get("properties")
        yield from properties if isinstance(properties, Mapping) else ()
        for child in values.values():
            yield from _names_of(child)
    elif isinstance(values, list):
        for value in values:
            yield from [value] if isinstance(value, str) else _names_of(value)
