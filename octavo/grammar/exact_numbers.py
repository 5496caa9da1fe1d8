"""Lark for schemas with numbers that llguidance would round, and for numbers that would have no end.

llguidance reads the numbers of a JSON schema as floating point: above 2**53 it would keep to another number. So the
way from the root of a schema to such a number is written as rules here, with numbers as text, and everything beside it
stays a JSON schema of its own. What such a number may not be combined with is refused by name.

Outside an object or array a number has no delimiter behind it, and a model may write digits until its tokens run
out. So at the root, too, numbers are written here, with a bounded number of digits.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from itertools import combinations
from typing import Any

from octavo.grammar.forms import OPTIONS, Part, literal
from octavo.grammar.number_ranges import INTEGER, Bound, integer_range, number_range
from octavo.grammar.subschemas import ANNOTATIONS, DEFINITIONS, UNSUPPORTED, Schema, reachable, target_of

WHITESPACE = r"\x20|\r?\n[\x20\x09]{0,40}"
"""Between two tokens of JSON: a space, or a newline and indentation; bounded, so a model cannot emit blanks forever."""
MAX_EXACT = 2**53 - 1
"""Up to here floating point holds an integer and its neighbours."""
FLOAT_DIGITS, FLOAT_EXPONENT = 15, 22
"""llguidance reads fractions with more digits, or with a larger power of ten, with an error in the last place."""
MAX_NUMBER_DIGITS = 400
"""Of a constant. A bound on the other side of zero may have more, since no number is written with as many."""
LARGEST = Decimal(10) ** 50
"""Bounds beyond it are lowered to it; no number has to be above it."""
MAX_MULTIPLE, MAX_DECIMALS = 2**32 - 1, 9
"""llguidance holds ``multipleOf`` as an integer of 32 bits and a power of ten."""
BOUNDS = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")
NUMERIC = frozenset((*BOUNDS, "multipleOf"))
STRING = frozenset(("minLength", "maxLength", "pattern", "format"))
OBJECT = frozenset(
    ("properties", "required", "additionalProperties", "patternProperties", "minProperties", "maxProperties")
)
ARRAY = frozenset(("items", "prefixItems", "additionalItems", "minItems", "maxItems"))
COMBINING = ("const", "enum", "$ref", "allOf", "anyOf", "oneOf")
OF_TYPE = {"number": NUMERIC, "integer": NUMERIC, "string": STRING, "object": OBJECT, "array": ARRAY}
TYPES = ("object", "array", "string", "number", "boolean", "null")
_KEY = r'/"[^"\\\x00-\x1F\x7F]*"/'
"""A property's name without escapes, so that none is written in two ways."""


UNSATISFIABLE = "cannot be used: no text satisfies it"


EMPTY = {"type": "object", "properties": {}, "additionalProperties": False}


class Inexact(Exception):
    """A schema with a number that cannot be kept to; the message continues after a field's name."""


def parts_of_schema(schema: Schema, name: str) -> list[Part]:
    """``schema`` as parts, the first of which matches it; further ones are called after ``name``. Raises ``Inexact``.

    Without a number that needs it, this is one part, the schema itself.
    """
    if {key: value for key, value in schema.items() if value != [] or key != "required"} == EMPTY:
        return [{"lark_grammar": 'start: "{}"'}]  # no blanks: clients compare arguments as text
    found = list(reachable(schema, schema))
    if any("$ref" in each and target_of(schema, each["$ref"]) is None for each in found) and _has_inexact(schema):
        raise Inexact(
            f"uses '$ref' other than as a pointer, together with the number {next(iter(_inexact_in(schema)))}"
        )
    _check_multiples(found)
    if _needs(schema, schema):
        return _Writer(schema, name).run(schema)
    if _may_be_number(schema, schema, frozenset()):
        try:
            return _Writer(schema, name, bounds_root=True).run(schema)
        except Inexact:
            pass  # combined in a way that is not written here: digits without a bound are no error
    return [json_part(schema)]


def json_part(schema: Schema) -> Part:
    return {"json_schema": {**schema, OPTIONS: {"whitespace_pattern": WHITESPACE}}}


# --- which schemas need it


def _needs(schema: Any, root: Schema) -> bool:
    """Whether a value of ``schema`` has a number that llguidance would round."""
    return any(map(_rounds, reachable(schema, root)))


def _rounds(schema: Mapping[str, Any]) -> bool:
    bounds = any(_is_inexact(schema[key]) for key in BOUNDS if key in schema)
    return bounds or _has_inexact(schema.get("const")) or _has_inexact(schema.get("enum"))


def _is_inexact(value: Any) -> bool:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    if isinstance(value, int) or not math.isfinite(value):
        return abs(value) > MAX_EXACT
    digits = Decimal(repr(value)).as_tuple()
    return abs(value) > MAX_EXACT or len(digits.digits) > FLOAT_DIGITS or abs(int(digits.exponent)) > FLOAT_EXPONENT


def _has_inexact(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_has_inexact, value.values()))
    return any(map(_has_inexact, value)) if isinstance(value, list) else _is_inexact(value)


def _may_be_number(schema: Any, root: Schema, within: frozenset[str]) -> bool:
    """Whether a value of ``schema`` may be a number without an end."""
    if not isinstance(schema, Mapping) or "const" in schema or "enum" in schema:
        return schema is True
    if not {"number", "integer"} & set(_types(schema)):
        return False
    reference = schema.get("$ref")
    if isinstance(reference, str):
        target = target_of(root, reference)
        return reference not in within and _may_be_number(target, root, within | {reference})
    for key in ("anyOf", "oneOf", "allOf"):
        if isinstance(schema.get(key), list):
            found = (_may_be_number(each, root, within) for each in schema[key])
            return all(found) if key == "allOf" else any(found)
    return True


def _check_multiples(schemas: Sequence[Mapping[str, Any]]) -> None:
    """Raise ``Inexact`` for a ``multipleOf`` that llguidance would round, or would let overflow when it joins two."""
    given = {s["multipleOf"] for s in schemas if isinstance(s.get("multipleOf"), int | float)} - {0}
    digits = [_decimal(value).copy_abs().normalize() for value in given]
    exponent = max([0, *(-int(each.as_tuple().exponent) for each in digits)])
    joins = any("allOf" in s or ("multipleOf" in s and not {"$ref", "anyOf", "oneOf"}.isdisjoint(s)) for s in schemas)
    largest = math.prod(each.scaleb(exponent) for each in digits) if joins else max(digits, default=Decimal(0))
    if (
        exponent > MAX_DECIMALS
        or largest > MAX_MULTIPLE
        or any(each.scaleb(exponent) > MAX_MULTIPLE for each in digits)
    ):
        raise Inexact(f"has a 'multipleOf' with too many digits: {', '.join(map(str, given))}"[:200])


# --- rules


class _Writer:
    """Writes the rules of one schema."""

    def __init__(self, root: Schema, name: str, bounds_root: bool = False) -> None:
        self._root = root
        self._name = name
        self._bounds_root = bounds_root
        self._rules = ['%llguidance {"ignore_once": true}', f"%ignore /{WHITESPACE}/"]
        self._parts: list[Part] = []
        self._references: dict[str, str] = {}
        self._pending: list[tuple[str, Any]] = []
        self._needed: dict[int, bool] = {}

    def _needs(self, schema: Any) -> bool:
        if id(schema) not in self._needed:
            self._needed[id(schema)] = _needs(schema, self._root)
        return self._needed[id(schema)]

    def run(self, schema: Schema) -> list[Part]:
        start = self._write(schema, self._bounds_root)
        while self._pending:
            name, target = self._pending.pop()
            self._rules.append(f"{name}: {self._write(target, False)}")
        return [{"lark_grammar": "\n".join([*self._rules, f"start: {start}"])}, *self._parts]

    def _rule(self, body: str, kind: str = "r") -> str:
        """The name of a new rule, or with another kind of a new terminal."""
        name = f"{kind}{len(self._rules)}"
        self._rules.append(f"{name}: {body}")
        return name

    def _write(self, schema: Any, is_root: bool) -> str:
        """Lark of ``schema``."""
        if schema is False:
            raise Inexact(UNSATISFIABLE)
        if not isinstance(schema, Mapping) or not (self._needs(schema) or (is_root and self._ends_open(schema))):
            return self._json(schema)
        if unsupported := sorted(set(UNSUPPORTED) & set(schema)):
            raise Inexact(f"uses '{unsupported[0]}', which is not supported")
        own = {key: value for key, value in schema.items() if key in _KNOWN}
        combining = [key for key in COMBINING if key in own]
        if not combining:
            return self._alternatives([self._typed(own, kind, is_root) for kind in _types(own)])
        siblings = {key: value for key, value in own.items() if key != combining[0]}
        if combining[0] in ("const", "enum"):
            return self._values(own, siblings)
        if combining[0] == "$ref" and not siblings:
            return self._reference(own["$ref"], is_root)
        if combining[0] == "allOf" and isinstance(own["allOf"], list):
            return self._write(_merged([siblings, *own["allOf"]]), is_root)
        if combining[0] in ("anyOf", "oneOf") and isinstance(own[combining[0]], list):
            options = [_merged([siblings, option]) if siblings else option for option in own[combining[0]]]
            if combining[0] == "oneOf":
                _check_exclusive(options)
            return self._alternatives([self._write(option, is_root) for option in options if option is not False])
        raise _refusal(schema, combining[0])

    def _ends_open(self, schema: Mapping[str, Any]) -> bool:
        return self._bounds_root and _may_be_number(schema, self._root, frozenset())

    def _alternatives(self, options: Sequence[str]) -> str:
        if not options:
            raise Inexact(UNSATISFIABLE)
        return f"({' | '.join(options)})"

    def _json(self, schema: Any) -> str:
        """A part for a schema without such a number."""
        if not isinstance(schema, Mapping) and schema is not True:
            raise Inexact("cannot be used: schema must be an object or boolean")
        if any(each.get("$ref") == "#" for each in reachable(schema, self._root)):
            raise _refusal(self._root, "$ref")  # the root is another schema in a part of its own
        name = f"{self._name}_{len(self._parts)}"
        own = {key: value for key, value in schema.items() if key not in DEFINITIONS} if schema is not True else {}
        definitions = {key: self._root[key] for key in DEFINITIONS if key in self._root}
        self._parts.append({"name": name, **json_part({**own, **definitions})})
        return f"@{name}"

    def _reference(self, reference: Any, is_root: bool) -> str:
        target = target_of(self._root, reference)
        if target is None:
            raise _refusal(self._root, "$ref")
        if is_root and self._bounds_root:
            return self._write(target, is_root)
        if reference not in self._references:
            self._references[reference] = f"ref{len(self._references)}"
            self._pending.append((self._references[reference], target))
        return self._references[reference]

    def _typed(self, schema: Schema, kind: str, is_root: bool) -> str:
        """Lark of the values of one type."""
        only = {key: value for key, value in schema.items() if key in OF_TYPE.get(kind, ())}
        is_needed = _needs(only, self._root)
        if kind in ("number", "integer") and (is_needed or (is_root and self._bounds_root)):
            return self._number(only, kind)
        if not is_needed:
            return self._json({**only, "type": kind})
        return self._object(only) if kind == "object" else self._array(only)

    # --- numbers and values

    def _number(self, schema: Schema, kind: str) -> str:
        bounds = _bounds_of(schema)
        if "multipleOf" in schema:
            if any(_is_inexact(schema.get(key)) for key in BOUNDS):
                raise _refusal(schema, "multipleOf")
            ends = dict(zip(("minimum", "maximum"), (-MAX_EXACT, MAX_EXACT), strict=True)) if kind == "integer" else {}
            missing = {key: end for key, end in ends.items() if not {key, f"exclusive{key.title()}"} & set(schema)}
            return self._json({**schema, **missing, "type": kind})
        expressions = _whole(*bounds) if kind == "integer" else number_range(*bounds)
        if expressions is None:
            raise Inexact("cannot be used: no number is within its bounds")
        return self._rule(" & ".join(f"/{each}/" for each in expressions), "N")

    def _values(self, schema: Schema, siblings: Schema) -> str:
        """Lark of a constant, or of one of several."""
        values = [schema["const"]] if "const" in schema else schema["enum"]
        if "const" in schema and "enum" in siblings:
            values = [value for value in values if any(same(value, other) for other in schema["enum"])]
        if others := set(siblings) - NUMERIC - {"type", "enum"}:
            raise _refusal(schema, min(others))
        if "multipleOf" in siblings:
            raise _refusal(schema, "multipleOf")
        low, high = _bounds_of(siblings)
        fitting = [v for v in values if any(_is_of(v, kind) for kind in _types(siblings)) and _is_within(v, low, high)]
        scalars = [literal(text_of_value(value)) for value in fitting if not isinstance(value, dict | list)]
        found = [self._rule(" | ".join(scalars), "V")] if scalars else []
        return self._alternatives([*found, *(self._value(v) for v in fitting if isinstance(v, dict | list))])

    def _value(self, value: Any) -> str:
        """Lark of one value, with blanks between its tokens."""
        if isinstance(value, list):
            inner = ' "," '.join(map(self._value, value))
            return f'"[" {inner} "]"'
        if isinstance(value, dict):
            inner = ' "," '.join(
                f'{literal(text_of_value(key))} ":" {self._value(child)}' for key, child in value.items()
            )
            return f'"{{" {inner} "}}"'
        return literal(text_of_value(value))

    # --- objects and arrays

    def _object(self, schema: Schema) -> str:
        for key in ("patternProperties", "minProperties", "maxProperties"):
            if key in schema:
                raise _refusal(schema, key)
        properties, required = schema.get("properties", {}), schema.get("required", [])
        others = schema.get("additionalProperties", True)
        if not isinstance(properties, Mapping):
            raise Inexact("cannot be used: properties must be an object")
        if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
            raise Inexact("cannot be used: 'required' must be a list of names")
        listed = {**properties, **{name: others for name in required if name not in properties}}
        pairs = []
        for name, value in listed.items():
            if value is not False:
                pairs.append((f'{literal(text_of_value(name))} ":" {self._write(value, False)}', name in required))
            elif name in required:
                raise Inexact(UNSATISFIABLE)
        if others is not False:
            taken = "".join(f" & ~{literal(text_of_value(name))}" for name in listed)
            pair = self._rule(f'{self._rule(_KEY + taken, "K")} ":" {self._write(others, False)}')
            pairs.append((f'{pair} ("," {pair})*', False))
        # Rules from the last pair to the first: what may follow when pairs came before, and when none did.
        after = first = ""
        for pair, is_required in reversed(pairs):
            pair = self._rule(pair)
            starts = f"{pair} {after}"
            first = self._rule(starts if is_required else f"{starts} | {first}" if first else f"({starts})?")
            after = self._rule(f'"," {starts}' if is_required else f'("," {pair})? {after}')
        return f'"{{" {first} "}}"'

    def _array(self, schema: Schema) -> str:
        items, prefix = schema.get("items", True), schema.get("prefixItems", [])
        if isinstance(items, list) or "additionalItems" in schema:
            items, prefix = schema.get("additionalItems", True), items if isinstance(items, list) else []
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        if not isinstance(prefix, list) or not _is_count(least) or not (most is None or _is_count(most)):
            raise Inexact("cannot be used: an array's bounds must be whole numbers and its 'prefixItems' a list")
        prefix = prefix if most is None else prefix[:most]
        tail = self._items(items, max(least - len(prefix), 0), None if most is None else most - len(prefix), not prefix)
        for place, each in reversed(list(enumerate(prefix))):
            if each is False and place < least:
                raise Inexact(UNSATISFIABLE)
            comma = '"," ' if place else ""
            element = "" if each is False else self._rule(f"{comma}{self._write(each, False)} {tail}")
            tail = element if place < least else f"({element})?" if element else ""
        return f'"[" {tail} "]"'

    def _items(self, items: Any, least: int, most: int | None, is_first: bool) -> str:
        """Lark of the elements behind those with schemas of their own, each of which has a comma in front of it."""
        if (most is not None and least > most) or (items is False and least):
            raise Inexact(UNSATISFIABLE)
        if items is False or most == 0:
            return ""
        item = self._rule(self._write(items, False))
        if not is_first:
            return f'("," {item}){{{least},{"" if most is None else most}}}'
        more = "" if most == 1 else f'("," {item}){{{max(least - 1, 0)},{"" if most is None else most - 1}}}'
        return f"{item} {more}" if least else f"({item} {more})?"


_KNOWN = frozenset((*COMBINING, "type", *NUMERIC, *STRING, *OBJECT, *ARRAY))


def _refusal(schema: Mapping[str, Any], keyword: str) -> Inexact:
    found = next(iter(_inexact_in(schema)), None)
    return Inexact(f"uses the number {found} together with '{keyword}', which is not supported")


def _inexact_in(value: Any) -> Iterable[Any]:
    if isinstance(value, Mapping):
        for child in value.values():
            yield from _inexact_in(child)
    elif isinstance(value, list):
        for child in value:
            yield from _inexact_in(child)
    elif _is_inexact(value):
        yield value


def _types(schema: Mapping[str, Any]) -> Sequence[str]:
    """The types of a schema's values; an integer is a number too."""
    given = schema.get("type", TYPES)
    names = [given] if isinstance(given, str) else list(given) if isinstance(given, list | tuple) else []
    if unknown := [name for name in names if name not in (*TYPES, "integer")]:
        raise Inexact(f"cannot be used: Invalid type: {unknown[0]}")
    return [name for name in names if name != "integer" or "number" not in names]


def _merged(schemas: Sequence[Any]) -> Schema:
    """Schemas that all hold as one, if no keyword but a bound is in two of them. Raises ``Inexact``."""
    result: Schema = {}
    for schema in schemas:
        if schema is True:
            continue
        if not isinstance(schema, Mapping):
            raise Inexact(UNSATISFIABLE)
        for key, value in schema.items():
            if key in ("minimum", "exclusiveMinimum") and key in result:
                result[key] = max(result[key], value)
            elif key in ("maximum", "exclusiveMaximum") and key in result:
                result[key] = min(result[key], value)
            elif key in result and result[key] != value and key not in ANNOTATIONS:
                raise _refusal({"allOf": list(schemas)}, key)
            else:
                result[key] = value
    holders = [schema for schema in schemas if isinstance(schema, Mapping) and set(schema) & (OBJECT | ARRAY)]
    if len(holders) > 1 or ("$ref" in result and len([schema for schema in schemas if schema]) > 1):
        raise _refusal({"allOf": list(schemas)}, "allOf")
    return result


def _check_exclusive(options: Sequence[Any]) -> None:
    """Raise ``Inexact`` unless at most one of the options holds for each value."""
    for one, other in combinations(options, 2):
        if not _are_exclusive(one, other):
            raise Inexact("uses 'oneOf' with schemas that are not plainly exclusive, which is not supported")


def _are_exclusive(one: Any, other: Any) -> bool:
    if not isinstance(one, Mapping) or not isinstance(other, Mapping):
        return one is False or other is False
    values, others = _constants(one), _constants(other)
    if values is not None and others is not None:
        return not any(same(a, b) for a in values for b in others)
    kinds, other_kinds = (
        {"number" if kind == "integer" else kind for kind in _types(each)}
        if values is None
        else {kind for kind in TYPES for value in values if _is_of(value, kind)}
        for each, values in ((one, values), (other, others))
    )
    if not kinds & other_kinds:
        return True
    names = {*one.get("required", ()), *other.get("required", ())}
    pairs = [(one.get("properties", {}).get(name), other.get("properties", {}).get(name)) for name in names]
    both_objects = kinds == other_kinds == {"object"}
    return both_objects and any(a is not None and b is not None and _are_exclusive(a, b) for a, b in pairs)


def _constants(schema: Mapping[str, Any]) -> list[Any] | None:
    if "const" in schema:
        return [schema["const"]]
    return schema["enum"] if isinstance(schema.get("enum"), list) else None


def _bounds_of(schema: Schema) -> tuple[Bound | None, Bound | None]:
    """The stricter of the lower and of the upper bounds. Raises ``Inexact``."""
    ends: list[Bound | None] = []
    for name in ("minimum", "maximum"):
        exclusive = schema.get(f"exclusive{name.title()}")
        found = []
        if name in schema:
            # In draft 4 ``exclusiveMinimum`` is a boolean, which says of what kind ``minimum`` is.
            found.append(Bound(_limit(schema, name), exclusive is not True))
        if exclusive is not None and not isinstance(exclusive, bool):
            found.append(Bound(_limit(schema, f"exclusive{name.title()}"), False))
        found.sort(key=lambda bound: (bound.value, bound.is_inside == (name == "maximum")))
        ends.append(None if not found else found[-1] if name == "minimum" else found[0])
    low, high = ends
    if (low and low.value > LARGEST) or (high and high.value < -LARGEST):
        raise Inexact("cannot be used: its numbers are beyond 10**50")
    return low and Bound(max(low.value, -LARGEST), low.is_inside), high and Bound(
        min(high.value, LARGEST), high.is_inside
    )


def _limit(schema: Schema, name: str) -> Decimal:
    value = schema[name]
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise Inexact(f"cannot be used: '{name}' must be a number")
    return _decimal(value)


def _decimal(value: float) -> Decimal:
    """The number that a client wrote. Raises ``Inexact`` for one with too many digits."""
    digits = Decimal(value) if isinstance(value, int) else Decimal(repr(value))
    if not digits.is_finite() or max(len(digits.as_tuple().digits), abs(digits.adjusted())) > MAX_NUMBER_DIGITS:
        raise Inexact(f"has a number of more than {MAX_NUMBER_DIGITS} digits, which is not supported")
    return digits


def _whole(low: Bound | None, high: Bound | None) -> tuple[str, ...] | None:
    """Expressions of the integers within the bounds."""
    least = most = None
    if low is not None:
        least = int(low.value.to_integral_value("ROUND_CEILING"))
        least += least == low.value and not low.is_inside
    if high is not None:
        most = int(high.value.to_integral_value("ROUND_FLOOR"))
        most -= most == high.value and not high.is_inside
    if least is None and most is None:
        return (INTEGER,)
    found = integer_range(least, most)
    return None if found is None else (found,)


def _is_within(value: Any, low: Bound | None, high: Bound | None) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return True
    digits = _decimal(value)
    above = low is None or digits > low.value or (digits == low.value and low.is_inside)
    return above and (high is None or digits < high.value or (digits == high.value and high.is_inside))


def _is_of(value: Any, kind: str) -> bool:
    """Whether a JSON value is of a JSON type."""
    if kind in ("number", "integer"):
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return is_number and (kind == "number" or value == int(value))
    kinds = {"object": dict, "array": list, "string": str, "boolean": bool, "null": type(None)}
    return isinstance(value, kinds[kind])


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def same(one: Any, other: Any) -> bool:
    """Whether two JSON values are equal: true is not 1, but 1.0 is."""
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(value, other[key]) for key, value in one.items())
    return bool(one == other)


def text_of_value(value: Any) -> str:
    """JSON of a scalar, with all digits of a number."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return f"{_decimal(value):f}"
    return json.dumps(value, ensure_ascii=False)
