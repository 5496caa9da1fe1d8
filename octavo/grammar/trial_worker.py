"""The child process that tests grammars: see ``octavo.system.child_worker``.

The settings hold the vocabulary's special tokens, the data behind them all of its tokens; a question is the text of a
grammar, and the answer is the normalised text for the engine.
"""

from __future__ import annotations

import os

from octavo.system.child_worker import ChildWorker, receive, start

NICENESS = 10
"""Grammars are tested next to an engine that may need every core."""


def main() -> None:
    os.nice(NICENESS)  # before the imports, which alone take hundreds of milliseconds
    from octavo.grammar.tester import Tester
    from octavo.grammar.vocabulary import Vocabulary, unpack_tokens

    started = start()
    if started is not None:
        connection, settings = started
        tokens = receive(connection)
        if tokens is not None:
            vocabulary = Vocabulary(unpack_tokens(tokens), settings["special_ids"], settings["eos_ids"])
            ChildWorker(connection, settings).run(Tester(vocabulary).serve)


if __name__ == "__main__":
    main()
