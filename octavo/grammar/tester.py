"""Tests a grammar as the engine will use it, and describes its errors."""

from __future__ import annotations

import random
import time
from typing import Any

import numpy as np
from llguidance import LLMatcher

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
)
from octavo.grammar.schema_patterns import with_names
from octavo.grammar.vocabulary import Vocabulary
from octavo.grammar.weakening import weaker
from octavo.system.child_worker import LATE, REFUSED, RENDERED, Answer, answer_of

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
        return answer_of(self._try, text)

    def _try(self, text: str) -> Answer:
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
