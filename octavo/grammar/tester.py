"""Tries a grammar out as the engine will use it, and says in words what is wrong with it."""

from __future__ import annotations

import time

from octavo.child_worker import FAILED, LATE, REFUSED, RENDERED, Answer, described
from octavo.grammar.matchers import GrammarError, compile_matcher, make_tokenizer, normalised
from octavo.grammar.vocabulary import Vocabulary

MAX_COMPILE_SECONDS = 0.25
"""Of the processor: the engine's process will need as long, beside its steps."""


class Tester:
    """Compiles grammars over one vocabulary."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._tokenizer = make_tokenizer(vocabulary)

    def serve(self, text: str) -> Answer:
        """The normalised grammar, or what is wrong with it."""
        try:
            grammar = normalised(text)
            started = time.process_time()
            compile_matcher(grammar, self._tokenizer)
            if time.process_time() - started > MAX_COMPILE_SECONDS:
                return LATE, "cannot be used: compiling it takes too long"
        except GrammarError as error:
            return REFUSED, str(error)
        except MemoryError:
            raise
        except Exception as error:  # whatever the library raises
            return FAILED, described(error)
        return RENDERED, grammar
