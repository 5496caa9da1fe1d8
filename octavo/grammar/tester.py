"""Tests a grammar as the engine will use it, and describes its errors."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from llguidance import LLMatcher

from octavo.errors import CANCELLATIONS
from octavo.grammar.exact_numbers import NUMERIC, TYPES
from octavo.grammar.forms import WEAKENS, grammar_text, parts_of, text_of
from octavo.grammar.matchers import (
    FREE_SECONDS,
    SECONDS_PER_TOKEN,
    GrammarError,
    Mask,
    check,
    compile_matcher,
    fill_mask,
    make_tokenizer,
    new_mask,
    normalised,
    with_names,
)
from octavo.grammar.subschemas import UNSUPPORTED, Schema, mapped, target_of
from octavo.grammar.vocabulary import Vocabulary
from octavo.system.child_worker import FAILED, LATE, REFUSED, RENDERED, Answer, described

# Weaker schemas, for functions whose schema no grammar keeps to: all valid arguments stay valid, and some others are.
# Each keyword that cannot be kept to is left out at its place, and its place reported.

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


MAX_COMPILE_SECONDS = 0.25
"""Limit of processor time: the engine's process will spend as much while its steps run."""
WALKS = (16, 16, 16, 128)
"""Maximum tokens of each random text that a test generates."""


class Tester:
    """Compiles grammars over one vocabulary."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._tokenizer = make_tokenizer(vocabulary)
        self._eos_ids = frozenset(vocabulary.eos_ids)

    def serve(self, text: str) -> Answer:
        """The normalised grammar, or a description of the error.

        A grammar of one part that may be weakened becomes a weaker one where the part cannot be kept to.
        """
        answer = self._tried(text)
        if answer[0] in (REFUSED, LATE) and (weakened := self._weakened(text)) is not None:
            answer = self._tried(weakened)
        return answer

    def _tried(self, text: str) -> Answer:
        try:
            grammar = normalised(text)
            started = time.process_time()
            matcher = compile_matcher(grammar, self._tokenizer)
            if time.process_time() - started > MAX_COMPILE_SECONDS:
                return LATE, "cannot be used: compiling it takes too long"
            if not self._can_be_written(matcher):
                return LATE, "cannot be used: computing what it allows takes too long"
        except GrammarError as error:
            return REFUSED, str(error)
        except MemoryError:
            raise
        except CANCELLATIONS:
            raise
        except BaseException as error:  # whatever the library raises
            return FAILED, described(error)
        return RENDERED, grammar

    def _weakened(self, text: str) -> str | None:
        """The grammar of a weaker schema that can be kept to; ``None`` for other grammars, or if there is none."""
        part, *others = parts_of(text)
        if others or WEAKENS not in part:
            return None
        try:
            schema, left_out = weaker(with_names(part["schema"]), self._is_usable)
        except (TypeError, ValueError, AttributeError, RecursionError):  # no JSON schema
            return None
        weakened = text_of([{**part, "schema": schema}], [part[WEAKENS] + place for place in left_out])
        return weakened if left_out and self._tried(weakened)[0] == RENDERED else None

    def _is_usable(self, schema: dict[str, Any]) -> bool:
        return self._tried(grammar_text({"schema": schema}))[0] == RENDERED

    def _can_be_written(self, start: LLMatcher) -> bool:
        """Generate a few random texts; returns whether that is fast enough. Raises ``GrammarError`` at a limit.

        A matcher is built lazily: many limits are reached only after the first token.
        """
        mask = new_mask(self._tokenizer)
        deadline = time.process_time() + FREE_SECONDS
        for seed, length in enumerate(WALKS):
            matcher, rng = start.deep_copy(), random.Random(seed)
            for _ in range(length):
                fill_mask(matcher, mask)
                check(matcher)
                token = _any_of(mask, rng)
                if token is None or token in self._eos_ids:
                    break
                matcher.consume_token(token)
                check(matcher)
                deadline += SECONDS_PER_TOKEN
                if time.process_time() > deadline:
                    return False
        return True


def _any_of(mask: Mask, rng: random.Random) -> int | None:
    """A random token that ``mask`` allows, drawn as a byte and one of its bits; ``None`` for an empty mask."""
    found = np.flatnonzero(mask)
    if not len(found):
        return None
    byte = int(found[rng.randrange(len(found))])
    return 8 * byte + rng.choice([bit for bit in range(8) if mask[byte] >> bit & 1])
