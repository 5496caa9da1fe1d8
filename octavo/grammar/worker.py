"""The child process that tries grammars out: see ``octavo.child_worker``.

The settings have the vocabulary; a question is the text of a grammar, and the answer is the text that the engine gets.
"""

from __future__ import annotations

import base64
import os
import time

from octavo.child_worker import FAILED, REFUSED, RENDERED, Answer, ChildWorker, described, start
from octavo.grammar.matchers import GrammarError, compile_matcher, make_tokenizer, normalised
from octavo.grammar.vocabulary import Vocabulary

NICENESS = 10
"""Grammars are tried beside an engine that may need every core."""
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
                return REFUSED, "cannot be used: compiling it takes too long"
        except GrammarError as error:
            return REFUSED, str(error)
        except MemoryError:
            raise
        except Exception as error:  # whatever the library raises
            return FAILED, described(error)
        return RENDERED, grammar


def main() -> None:
    started = start()
    if started is not None:
        connection, settings = started
        os.nice(NICENESS)
        tokens = [base64.b64decode(token) for token in settings["tokens"]]
        vocabulary = Vocabulary(tokens, settings["special_ids"], settings["eos_ids"])
        ChildWorker(connection, settings).run(Tester(vocabulary).serve)


if __name__ == "__main__":
    main()
