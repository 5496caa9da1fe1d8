"""Whether the executor's drafter runs at all: while its drafts pay, or might if fewer sequences ran."""

from __future__ import annotations

from octavo.engine.timing.step_costs import LEAST_SEEN, StepCosts
from octavo.steps.graph_shapes import NO_DRAFTER
from octavo.types import Plan, Sampled

TRIAL = 32
"""Steps with the drafter, after which its use is decided."""
MOST_LOSS = 16
"""A trial ends when it has lost the time of so many steps: a large drafter's steps take many times as long."""
LOAD_CHANGE = 2
"""A rest ends when so many times as many sequences decode as when it began, or as few."""
FIRST_REST, LONGEST_REST = 128, 1024
"""Steps after a trial that did not pay, without the drafter or with its costs measured anew: twice as many after each
such trial, and half as many after one that did."""
OUTLIER = 8.0
"""Largest ratio of a step's duration to that without the drafter that counts: other steps wait for a compiler."""
HOPELESS = 0.25
"""Share of first drafts that are accepted below which the drafter rests."""
LEAST_TRIED, ENOUGH_TRIED, MOST_TRIED = 4, 16, 64
"""Numbers of first drafts: the least that this share is computed of, those after which none are verified just for it,
and those after which old ones count half."""
MOST_FILLING = 0.01
"""Share of a step beyond which a drafter does not go on filling its cache while its drafts do not pay: that costs time
in every step, and what its cache lacks is gone with the sequences of the rest."""


class DrafterSwitch:
    """Compares what drafts save with what the drafter costs, over the steps of a trial.

    A drafter costs time in every step, even if none of its drafts is verified: it fills its cache with all tokens.
    While it rests, steps are those of an engine without a drafter. Its cache then lacks the tokens of these steps, so
    that later drafts of the same sequences are worse. So it goes on filling its cache if that is cheap, where right
    drafts do not pay, as in a large batch. Else it rests until the batch has another size, or for some steps.
    """

    def __init__(self, filling: StepCosts, drafting: StepCosts) -> None:
        """``filling``: costs of steps in which the drafter only fills its cache; ``drafting``: of those with drafts."""
        self._filling, self._drafting = filling, drafting
        self._resting = StepCosts(filling.drift)
        self._runs = True
        self._num_left = TRIAL
        self._rest = FIRST_REST
        self._num_seqs = self._judged_seqs = 0
        """Of the last step of decodes, and of that for which the drafts did not pay; 0 in a rest just to measure."""
        self._saved = self._spent = 0.0
        """Seconds, over the steps of a trial: what the tokens of accepted drafts would take in steps of decodes without
        the drafter, and what the steps took in addition to those without it."""
        self._tried = self._accepted = 0.0
        """First drafts of sequences that were verified, and accepted; old ones count less."""

    def runs(self) -> bool:
        """Whether the drafter runs in the next step; to be asked once for each step."""
        self._num_left -= 1
        if self._num_left < 0 or (not self._runs and self._has_other_load):
            self._decide()
        return self._runs

    @property
    def _has_other_load(self) -> bool:
        """Whether so many more or fewer sequences run than when the rest began that right drafts may pay now."""
        fewer, more = sorted((self._num_seqs, self._judged_seqs))
        return 0 < LOAD_CHANGE * fewer <= more and not self._is_hopeless

    def _decide(self) -> None:
        pays = self._saved > max(self._spent, 0.0)
        if not pays:
            self._drafting.forget()  # what drafts cost may be from while kernels were compiled
        if not self._runs:
            self._runs, self._num_left = True, TRIAL
        elif not self._resting.covers(self._num_seqs) and (pays or not self._is_hopeless):
            self._runs, self._num_left = False, LEAST_SEEN + 1  # their seconds without the drafter were estimated
            self._judged_seqs = 0
        elif pays:
            self._num_left, self._rest = TRIAL, max(FIRST_REST, self._rest // 2)
        else:
            self._runs = not (self._is_hopeless or self._filling_is_costly)
            self._num_left, self._rest = self._rest, min(2 * self._rest, LONGEST_REST)
            self._judged_seqs = self._num_seqs
        self._saved = self._spent = 0.0

    @property
    def is_unsure(self) -> bool:
        """Whether some drafts are to be verified whatever they cost, since too little is known."""
        return self._tried < ENOUGH_TRIED

    @property
    def _is_hopeless(self) -> bool:
        return self._tried >= LEAST_TRIED and self._accepted < HOPELESS * self._tried

    @property
    def _filling_is_costly(self) -> bool:
        filling = self._filling.seconds(self._num_seqs)
        if filling is None or not self._resting.covers(self._num_seqs):
            return False
        return filling > (1 + MOST_FILLING) * (self._resting.seconds(self._num_seqs) or filling)

    def learn(self, plan: Plan, sampled: list[Sampled]) -> None:
        """Record the results of a step."""
        if plan[0].num_proposed != NO_DRAFTER:
            num_decoding = sum([len(item.tokens) == 1 or bool(item.drafts) for item in plan])
            num_accepted = sum([max(0, len(result.tokens) - 1) for result in sampled])
            if self._tried > MOST_TRIED:
                self._tried, self._accepted = self._tried / 2, self._accepted / 2
            self._tried += sum([bool(item.drafts) for item in plan])
            self._accepted += sum([len(result.tokens) > 1 for result in sampled])
            if num_accepted:
                self._saved += num_accepted * (self._plain_seconds(num_decoding) or 0.0) / num_decoding

    def note_step(self, plan: Plan, seconds: float, plain: float | None = None) -> None:
        """Record the duration of a step. ``plain``: what it would take without drafts and the drafter; to be given for
        steps with prompts."""
        num_seqs = len(plan)
        if plain is None:
            self._num_seqs = num_seqs
        if plan[0].num_proposed == NO_DRAFTER:
            if plain is None:
                self._resting.note(num_seqs, seconds)
            return
        if plain is None:
            plain = self._plain_seconds(num_seqs) or seconds
        self._spent += min(seconds, OUTLIER * plain) - plain
        if self._spent - self._saved > MOST_LOSS * plain:
            self._num_left = 0

    def _plain_seconds(self, num_seqs: int) -> float | None:
        """Seconds of a step of decodes without the drafter; before any such step, of one that fills its cache."""
        return (self._resting if self._resting.covers(num_seqs) else self._filling).seconds(num_seqs)
