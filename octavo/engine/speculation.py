"""Speculative decoding: which drafts a step verifies."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from octavo.engine.proposer import NO_GUESS, Guess, Proposer
from octavo.types import Plan, Sampled, Sequence, Status

Drafts = Mapping[Sequence, tuple[int, ...]]
NO_DRAFTS: Drafts = {}


class Speculation:
    """Asks a proposer for drafts of the sequences that decode."""

    def __init__(self, proposer: Proposer, max_drafts: int) -> None:
        """``max_drafts``: most drafts of a sequence and step."""
        self.proposer = proposer
        self.max_drafts = max_drafts

    @property
    def num_lookahead(self) -> int:
        """See ``Proposer``."""
        return self.proposer.num_lookahead

    def choose(self, running: Iterable[Sequence]) -> Drafts:
        """The drafts that the next step verifies."""
        return {seq: guess.tokens for seq in running if (guess := self._guess(seq)).tokens}

    def _guess(self, seq: Sequence) -> Guess:
        if not seq.decodes or seq.status is not Status.RUNNING:
            return NO_GUESS
        count = min(self.max_drafts, seq.max_computed_tokens - len(seq.tokens))
        return self.proposer.propose(seq, count) if count > 0 else NO_GUESS

    def learn(self, plan: Plan, sampled: list[Sampled]) -> None:
        """Record the results of ``plan``."""

    def forget(self, seq: Sequence) -> None:
        """``seq`` has ended."""
        self.proposer.forget(seq)
