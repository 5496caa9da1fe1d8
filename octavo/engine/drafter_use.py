"""Whether the executor's drafter runs at all: while it raises the tokens per second of steps of decodes."""

from __future__ import annotations

from octavo.engine.step_costs import OUTLIER, StepCosts
from octavo.steps.shapes import NO_DRAFTER
from octavo.types import Plan, Sampled

TRIAL = 48
"""Steps with the drafter, after which its use is decided."""
FIRST_REST, LONGEST_REST = 128, 1024
"""Steps without the drafter after a trial that did not pay: twice as many after each such trial."""
FILLING_SHARE = 0.05
"""Share of a step that filling the drafter's cache is taken for, before any step of so many sequences was without."""


class DrafterUse:
    """Compares the steps of a trial with what the same steps take without the drafter.

    A drafter costs time in every step, even if none of its drafts is verified: it fills its cache with all tokens.
    While it rests, steps are those of an engine without a drafter. Its cache then lacks the tokens of these steps, so
    that later drafts of the same sequences may be worse; how often they are accepted is learnt as always.
    """

    def __init__(self, filling: StepCosts, drafting: StepCosts) -> None:
        """``filling``: costs of steps in which the drafter only fills its cache; ``drafting``: of those with drafts."""
        self._filling, self._drafting = filling, drafting
        self._resting = StepCosts(filling.drift)
        self._runs = True
        self._num_left = TRIAL
        self._rest = FIRST_REST
        self._tokens = self._seconds = 0.0
        """Of the trial's steps."""
        self._plain_tokens = self._plain_seconds = 0.0
        """The same without the drafter, by the costs of such steps."""

    def runs(self) -> bool:
        """Whether the drafter runs in the next step; to be asked once for each step."""
        self._num_left -= 1
        if self._num_left < 0:
            self._decide()
        return self._runs

    def _decide(self) -> None:
        if not self._runs:
            self._runs, self._num_left = True, TRIAL
            self._drafting.forget()  # it may be from while kernels were compiled
        elif self._tokens * self._plain_seconds >= self._plain_tokens * self._seconds:
            self._num_left, self._rest = TRIAL, FIRST_REST
        else:
            self._runs, self._num_left = False, self._rest
            self._rest = min(2 * self._rest, LONGEST_REST)
        self._tokens = self._seconds = self._plain_tokens = self._plain_seconds = 0.0

    def learn(self, plan: Plan, sampled: list[Sampled]) -> None:
        """Record the results of a step of decodes."""
        if plan[0].num_proposed != NO_DRAFTER:
            self._tokens += sum([len(result.tokens) for result in sampled])

    def note_step(self, plan: Plan, seconds: float) -> None:
        """Record the duration of a step of decodes."""
        num_seqs = len(plan)
        if plan[0].num_proposed == NO_DRAFTER:
            self._resting.note(num_seqs, seconds)
            return
        plain = self._resting.seconds(num_seqs) if self._resting.covers(num_seqs) else None
        if plain is None:
            plain = (1 - FILLING_SHARE) * (self._filling.seconds(num_seqs) or seconds)
        self._plain_tokens += num_seqs
        self._plain_seconds += plain
        self._seconds += min(seconds, OUTLIER * plain)
