"""Speculation with drafts that a test makes."""

from __future__ import annotations

from collections.abc import Callable

from octavo.engine.speculative.proposer import Proposal
from octavo.engine.speculative.speculation import Speculation
from octavo.types import Sequence

Guesses = Callable[[Sequence], list[int]]
"""Drafts for the tokens behind a sequence, whose last tokens may not be known."""


class FromFunction:
    """Proposes what a function says."""

    num_lookahead = 0

    def __init__(self, guesses: Guesses) -> None:
        self.guesses = guesses

    def propose(self, seq: Sequence, count: int) -> Proposal:
        return Proposal(tuple(self.guesses(seq)[:count]))

    def forget(self, seq: Sequence) -> None:
        """There is nothing to forget."""


def speculating(guesses: Guesses, max_drafts: int = 4) -> Speculation:
    return Speculation(FromFunction(guesses), max_drafts)


def last_known(seq: Sequence) -> int:
    """The last token of ``seq`` that is known."""
    return next(token for token in reversed(seq.tokens) if token is not None)
