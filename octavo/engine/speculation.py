"""Speculative decoding: which drafts a step verifies."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from octavo.engine.draft_choice import DraftChoice
from octavo.engine.proposer import NO_GUESS, Guess, Proposer
from octavo.types import Plan, Sampled, Sequence, Status

Drafts = Mapping[Sequence, tuple[int, ...]]
NO_DRAFTS: Drafts = {}


class Speculation:
    """Asks a proposer for drafts of the sequences that decode; without a ``choice``, all of them are verified."""

    def __init__(self, proposer: Proposer, max_drafts: int, choice: DraftChoice | None = None) -> None:
        """``max_drafts``: most drafts of a sequence and step."""
        self.proposer = proposer
        self.max_drafts = max_drafts
        self.choice = choice
        self._on_device = proposer.num_lookahead > 0
        self.makes_drafts = self._on_device
        """Whether the executor's drafter makes drafts at the end of the step that is being planned."""

    @property
    def num_lookahead(self) -> int:
        """See ``Proposer``."""
        return self.proposer.num_lookahead

    def choose(self, running: Iterable[Sequence]) -> Drafts:
        """The drafts that the next step verifies.

        Drafts of the executor's drafter must be made one step ahead: a step makes them if it would verify some itself,
        had the step before it made them.
        """
        if self.choice is None:
            return {seq: guess.tokens for seq in running if (guess := self._guess(seq)).tokens}
        had_drafts, pauses = self.makes_drafts or not self._on_device, self.choice.pauses
        measures_next = self._on_device and self.choice.measures_next
        if pauses:
            self.makes_drafts = measures_next
            return NO_DRAFTS
        decoding = [seq for seq in running if seq.decodes and seq.status is Status.RUNNING]
        guesses = {seq: guess for seq in decoding if (guess := self._guess(seq)).tokens}
        if not guesses:
            return NO_DRAFTS
        drafts = self.choice.choose(guesses, len(decoding))
        self.makes_drafts = measures_next or (self._on_device and bool(drafts))
        return drafts if had_drafts else NO_DRAFTS

    def _guess(self, seq: Sequence) -> Guess:
        if not seq.decodes or seq.status is not Status.RUNNING:
            return NO_GUESS
        limit = seq.request.params.num_speculative_tokens
        most = self.max_drafts if limit is None else min(limit, self.max_drafts)
        count = min(most, seq.max_computed_tokens - len(seq.tokens))
        return self.proposer.propose(seq, count) if count > 0 else NO_GUESS

    def learn(self, plan: Plan, sampled: list[Sampled]) -> None:
        """Record the results of ``plan``, which is about to be committed."""
        if self.choice is not None:
            self.choice.learn(plan, sampled)

    def note_step(self, plan: Plan, seconds: float) -> None:
        """Record that a step took ``seconds``."""
        if self.choice is not None:
            self.choice.note_step(plan, seconds)

    def forget(self, seq: Sequence) -> None:
        """``seq`` has ended."""
        self.proposer.forget(seq)
        if self.choice is not None:
            self.choice.forget(seq)


def makes_drafts(speculation: Speculation | None) -> bool:
    """Whether the executor's drafter, if it has one, makes drafts at the end of the step that is being planned."""
    return speculation is None or speculation.makes_drafts
