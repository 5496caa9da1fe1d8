"""Speculative decoding: which drafts a step verifies."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from octavo.engine.speculative.draft_choice import DraftChoice
from octavo.engine.speculative.proposer import NO_PROPOSAL, Proposal, Proposer
from octavo.engine.timing.step_budget import DraftRoom
from octavo.steps.graph_shapes import NO_DRAFTER
from octavo.types import Plan, Sampled, Sequence, Status

Drafts = Mapping[Sequence, tuple[int, ...]]
NO_DRAFTS: Drafts = {}
NEWEST = 0.1
"""Weight of the newest mixed step in the share of those that a step of decodes follows."""
LEAST_CHANCE = 0.25
"""How often a step of decodes has to follow a mixed step for a mixed step to make drafts at all. Drafts that pay save
several times what they cost; a mixed step that comes next does not verify them, and they are lost."""


class Speculation:
    """Asks a proposer for drafts of the sequences that decode; without a ``choice``, all of them are verified."""

    def __init__(self, proposer: Proposer, max_drafts: int, choice: DraftChoice | None = None) -> None:
        """``max_drafts``: most drafts of a sequence and step."""
        self.proposer = proposer
        self.max_drafts = max_drafts
        self.choice = choice
        self.on_device = proposer.num_lookahead > 0
        """Whether the executor's drafter makes the drafts."""
        self.num_proposed = max_drafts if self.on_device else NO_DRAFTER
        """Drafts of a sequence that the executor's drafter makes at the end of the step that is being planned;
        ``NO_DRAFTER``: it does not run."""
        self._pays_alone = True
        """Whether the last step of decodes had drafts, or would have had, had they been made."""
        self._was_mixed = False
        self._decodes_follow = 1.0
        """Share of mixed steps that a step of decodes follows."""

    @property
    def num_lookahead(self) -> int:
        """See ``Proposer``."""
        return self.proposer.num_lookahead

    def choose(self, running: Iterable[Sequence], room: DraftRoom | None = None) -> Drafts:
        """The drafts that the next step verifies; ``room`` for a mixed step of an executor that has a drafter.

        Drafts of the executor's drafter must be made one step ahead: a step makes as many as it would verify itself,
        had the step before it made all. A mixed step makes all or none, and verifies all that were made or none, so
        that there are few padded shapes: each has a graph, which may be captured while users wait.
        """
        if self.choice is None:
            return {seq: proposal.tokens for seq in running if (proposal := self._proposal(seq)).tokens}
        if self._was_mixed:
            self._decodes_follow += NEWEST * ((room is None) - self._decodes_follow)
        self._was_mixed = room is not None
        if self.choice.drafter_use is not None and not self.choice.drafter_use.runs():
            self.num_proposed = NO_DRAFTER
            return NO_DRAFTS
        num_made = max(0, self.num_proposed) if self.on_device else self.max_drafts
        if room is not None:
            proposals = self._proposals(running)
            made = {seq: proposal.first(num_made) for seq, proposal in proposals.items()}
            pays_next = self._pays_alone and self._decodes_follow > LEAST_CHANCE
            self.num_proposed = self.max_drafts if pays_next or self.choice.all_pay(proposals, room) else 0
            if not self.choice.all_pay(made, room):
                return NO_DRAFTS
            return {seq: proposal.tokens for seq, proposal in made.items()}
        pauses = self.choice.pauses
        num_measured = self.max_drafts if self.on_device and self.choice.measures_next else 0
        if pauses:
            if self.on_device:
                self.num_proposed = num_measured
            return NO_DRAFTS
        num_decoding = sum([seq.decodes and seq.status is Status.RUNNING for seq in running])
        proposals = self._proposals(running)
        if not proposals:
            return NO_DRAFTS
        drafts = self.choice.choose(proposals, num_decoding)
        self._pays_alone = bool(drafts)
        if self.on_device:
            self.num_proposed = num_measured or max(map(len, drafts.values()), default=0)
        return {seq: tokens[:num_made] for seq, tokens in drafts.items()} if num_made else NO_DRAFTS

    def _proposals(self, running: Iterable[Sequence]) -> dict[Sequence, Proposal]:
        return {seq: proposal for seq in running if (proposal := self._proposal(seq)).tokens}

    def _proposal(self, seq: Sequence) -> Proposal:
        if not seq.decodes or seq.status is not Status.RUNNING:
            return NO_PROPOSAL
        limit = seq.request.params.num_speculative_tokens
        most = self.max_drafts if limit is None else min(limit, self.max_drafts)
        count = min(most, seq.max_computed_tokens - len(seq.tokens))
        return self.proposer.propose(seq, count) if count > 0 else NO_PROPOSAL

    def learn(self, plan: Plan, sampled: list[Sampled]) -> None:
        """Record the results of ``plan``, which is about to be committed."""
        if self.choice is not None:
            self.choice.learn(plan, sampled)

    def note_step(self, plan: Plan, seconds: float, plain: float | None = None) -> None:
        """Record that a step took ``seconds``; ``plain``: what a step with prompts would take without speculation."""
        if self.choice is not None:
            self.choice.note_step(plan, seconds, plain)

    def forget(self, seq: Sequence) -> None:
        """``seq`` has ended."""
        self.proposer.forget(seq)
        if self.choice is not None:
            self.choice.forget(seq)


def num_proposed(speculation: Speculation | None) -> int:
    """Drafts that the executor's drafter, if it has one, makes at the end of the step that is being planned; or
    ``NO_DRAFTER``."""
    return NO_DRAFTER if speculation is None else speculation.num_proposed
