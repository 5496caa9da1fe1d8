"""The text of a grammar, built from a client's constraints.

Format: llguidance's list of grammars, JSON ``{"grammars": [...]}``, the first of which is matched and may refer to the
others as ``@name``. Each is a ``Part``. https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

Part = dict[str, Any]
"""One grammar: ``{"json_schema": ...}`` and ``{"lark_grammar": ...}`` as llguidance reads them; ``{"schema": ...}``,
``{"regex": ...}`` or ``{"gbnf": ...}``, which are rewritten before they are compiled. With a ``name`` for others."""

WEAKENS = "weakens"
"""Key of a part that may be replaced by a weaker one, with the place of its schema in the client's request."""

SPACES = r"/[\x20\x0A\x0D\x09]{0,64}/"
OPTIONS = "x-guidance"
"""The key under which llguidance reads options in a schema."""
MAX_BYTES = 256 << 10
"""Limit for a schema, an expression, a grammar, or all choices together."""
MAX_GRAMMAR_BYTES = 1 << 20
"""Limit for the text of a list of grammars, quotes and separators included."""
MAX_DEPTH = 64
"""Levels of JSON. What reads it goes down level by level, on a stack that ends at some hundreds of them."""
TEXT = r"/(.|\n)*/"


class GrammarSource(NamedTuple):
    """A grammar that can be a part of a larger one."""

    start: str
    """Lark expression of the start rule."""
    rules: str = ""
    """Lark of the rules that ``start`` names, each ended by a newline."""
    parts: Mapping[str, Part] = {}
    """Grammars that ``start`` and ``rules`` refer to as ``@name``."""


class FormError(ValueError):
    """An invalid schema, expression or list; the message says why, continuing after the field's name."""


def is_deep(value: Any, levels: int = MAX_DEPTH) -> bool:
    """Whether a value of JSON is nested deeper than ``levels``."""
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else None
    return inner is not None and (levels == 0 or any(is_deep(each, levels - 1) for each in inner))


def json_schema(schema: Any) -> Part:
    """JSON that is valid against ``schema``, an object or a boolean, with closed objects. Raises ``FormError``."""
    if schema is True:
        schema = {}
    if not isinstance(schema, Mapping):
        raise FormError("must be a JSON schema: an object")
    if is_deep(schema):
        raise FormError(f"is nested deeper than {MAX_DEPTH} levels")
    try:
        encoded = msgspec.json.encode(schema)
    except (TypeError, ValueError, OverflowError, RecursionError):
        raise FormError("must be plain JSON, without numbers of thousands of digits") from None
    _check_size(len(encoded))
    if f'"{OPTIONS}"'.encode() in encoded and _has_key(schema, OPTIONS):
        raise FormError(f"uses '{OPTIONS}', which is not supported")
    return {"schema": dict(schema)}


def arguments(schema: Mapping[str, Any] | None, place: str, is_strict: bool) -> Part:
    """The arguments of a function with the parameters ``schema``: none without one. Raises ``FormError``.

    Unless ``is_strict``, they may match a weaker schema where ``schema`` cannot be kept to; ``place`` is where it is
    in the client's request.
    """
    if not schema:
        return json_schema({"type": "object", "properties": {}, "additionalProperties": False})
    part = json_schema({**schema, "type": "object"})
    return part if is_strict else {**part, WEAKENS: place}


def json_object() -> Part:
    """Any JSON object."""
    return json_schema({"type": "object"})


def regex(text: Any) -> Part:
    """Text that a regular expression matches in full. Raises ``FormError``."""
    if not isinstance(text, str) or not text:
        raise FormError("must be a regular expression")
    _check_size(len(text))
    return {"regex": text}


def choice(texts: Any) -> Part:
    """One of the given texts. Raises ``FormError``."""
    if not isinstance(texts, Sequence) or isinstance(texts, str) or not texts:
        raise FormError("must be a list of at least one string")
    if not all(isinstance(text, str) and text for text in texts):
        raise FormError("must hold only strings that are not empty")
    _check_size(sum(map(len, texts)))
    # As a terminal the texts are one automaton; as alternatives of a rule each would be an entry of the parser.
    return {"lark_grammar": "start: CHOICE\nCHOICE: " + " | ".join(literal(text) for text in texts)}


def grammar(text: Any) -> Part:
    """A grammar in GBNF or Lark. Raises ``FormError``."""
    if not isinstance(text, str) or not text.strip():
        raise FormError("must be a grammar in GBNF or Lark")
    _check_size(len(text))
    return {"gbnf": text}


def just(part: Part) -> GrammarSource:
    """The grammar of one part."""
    return GrammarSource("@body", parts={"body": part})


class Tag(NamedTuple):
    """A constrained section of an otherwise free text."""

    begin: str
    part: Part
    end: str


def structural_tags(tags: Sequence[Tag], triggers: Sequence[str]) -> GrammarSource:
    """Free text in which each occurrence of one of ``triggers`` must begin one of ``tags``.

    Raises ``FormError`` for a tag that begins with no trigger or several, and for a trigger with which no tag begins.
    """
    if not tags or not triggers or not all(triggers):
        raise FormError("needs at least one structure and one trigger, and no trigger may be empty")
    starts: dict[str, list[str]] = {trigger: [] for trigger in triggers}
    for index, tag in enumerate(tags):
        found = [trigger for trigger in triggers if tag.begin.startswith(trigger)]
        if len(found) != 1:
            raise FormError(f"must have exactly one trigger with which {json.dumps(tag.begin)[:60]} begins")
        rest = tag.begin.removeprefix(found[0])
        texts = [literal(rest) if rest else "", f"@s{index}", literal(tag.end) if tag.end else ""]
        starts[found[0]].append(" ".join(text for text in texts if text))
    if not all(starts.values()):
        raise FormError("has a trigger with which no structure begins")
    rules = (
        "tagged: (" + " | ".join(f"tag{i}" for i in range(len(starts))) + ")* free\nfree: TEXT\nTEXT: " + TEXT + "\n"
    )
    for i, (trigger, bodies) in enumerate(starts.items()):
        rules += f"open{i}[lazy]: TEXT {literal(trigger)}\ntag{i}: open{i} ({' | '.join(bodies)})\n"
    return GrammarSource("tagged", rules, {f"s{index}": tag.part for index, tag in enumerate(tags)})


def literal(text: str) -> str:
    """``text`` as a Lark string."""
    return json.dumps(text, ensure_ascii=False)


def grammar_text(form: GrammarSource | Part) -> str:
    """The text of a form's or a single part's grammar."""
    if isinstance(form, dict):
        return text_of([form])
    rules = f"start: {form.start}\n{form.rules}"
    return text_of([{"lark_grammar": rules}, *({"name": name, **part} for name, part in form.parts.items())])


def source_of(text: Any) -> GrammarSource:
    """The form that ``grammar_text`` wrote as ``text``. Raises ``FormError``."""
    if not isinstance(text, str):
        raise FormError("must be a string")
    if len(text) > MAX_GRAMMAR_BYTES:
        raise FormError(f"must have at most {MAX_GRAMMAR_BYTES} characters")
    first, *others = parts_of(text)
    if any(is_deep(part, MAX_DEPTH + 1) for part in (first, *others)):
        raise FormError(f"is nested deeper than {MAX_DEPTH} levels")
    rules = first.get("lark_grammar")
    if rules is None and not others:
        return just(first)
    if not isinstance(rules, str) or not rules.startswith("start: ") or not all("name" in part for part in others):
        raise FormError("is not a grammar made by octavo.grammar.forms")
    start, _, rest = rules.removeprefix("start: ").partition("\n")
    return GrammarSource(start, rest, {str(part.pop("name")): part for part in others})


def parts_of(text: str) -> list[Part]:
    """The parts in the text of a grammar; raise ``FormError`` for invalid text."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    parts = value.get("grammars") if isinstance(value, dict) else None
    if not isinstance(parts, list) or not parts or not all(isinstance(part, dict) for part in parts):
        raise FormError("is not a grammar made by octavo.grammar.forms")
    return parts


def text_of(parts: Sequence[Part], weakened: Sequence[str] = ()) -> str:
    """The text of a list of parts, the first of which is matched; ``weakened`` are places that are not kept to."""
    notes = {"weakened": weakened} if weakened else {}
    return json.dumps({**notes, "grammars": parts}, ensure_ascii=False, separators=(",", ":"))


def weakened_in(text: str) -> tuple[str, ...]:
    """The places of the client's request that the grammar does not keep to."""
    return tuple(json.loads(text)["weakened"]) if text.startswith('{"weakened":') else ()


def _check_size(size: int) -> None:
    if size > MAX_BYTES:
        raise FormError(f"is larger than {MAX_BYTES} bytes, the most that is accepted")


def _has_key(value: Any, key: str) -> bool:
    if isinstance(value, Mapping):
        return key in value or any(_has_key(child, key) for child in value.values())
    return isinstance(value, list) and any(_has_key(child, key) for child in value)
