"""How many drafts a step verifies: as many as raise the expected tokens per second of the whole batch."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Several
from weakref import WeakKeyDictionary

from octavo.engine.speculative.drafter_switch import DrafterSwitch
from octavo.engine.speculative.proposer import Proposal
from octavo.engine.timing.step_budget import DraftRoom
from octavo.engine.timing.step_costs import StepCosts
from octavo.types import Plan, Sampled, Sequence

MARGIN = 0.03
"""Drafts must promise so much more than no drafts: estimates have errors, and a rejected draft gives nothing."""
MIXED_MARGIN = 0.2
"""In mixed steps, which have many sizes: what a step of each takes is known less well than for steps of decodes."""
STEPS_BETWEEN_MEASUREMENTS = 256
"""Now and then a step has no drafts, and another one has drafts whatever they promise, so that costs are known."""
HOPEFUL, STEPS_BETWEEN_HOPES = 4, 64
BOLD, STEPS_BETWEEN_BOLD = 2, 256
"""So many steps in a row, now and then, take what drafts cost for half of what it was found to be; the bold ones, which
are rarer, also for no more than fewer drafts cost: of two, the second verifies what the first has made. So sizes are
tried again that were slow when they were last tried, on a busy machine, without a graph or while kernels were
compiled, if that could pay."""
PROBES = 8
"""Drafts that are verified, whatever they cost, while it is not known whether a drafter's drafts are ever right."""
MANY_SEQS, PAUSE = 32, 8
"""A batch of many sequences that gains nothing from drafts is looked at again after so many steps."""


class DraftChoice:
    """Chooses among the drafts of all sequences by the probability that they are accepted.

    A step of N sequences that verifies the drafts with the D largest survival probabilities gives N plus their sum in
    expected tokens. D is what makes tokens divided by the duration of a step of N + D rows largest. The drafts of a
    sequence are chosen in order, since their survival probabilities fall.
    """

    def __init__(self, max_drafts: int, on_device: bool = False) -> None:
        """``on_device``: drafts come from the executor's drafter, so that steps with drafts have its cost, too."""
        self.costs = StepCosts()
        self.drafting_costs = StepCosts(self.costs.drift) if on_device else self.costs
        """Of steps at whose end a drafter makes as many drafts of a sequence as the step verifies."""
        self.drafter_use = DrafterSwitch(self.costs, self.drafting_costs) if on_device else None
        self.rates = AcceptanceRates(max_drafts)
        self._num_steps = 0
        self._pause = 0

    @property
    def pauses(self) -> bool:
        """Whether the next step has no drafts, whatever they are; to be asked once for each step."""
        self._num_steps += 1
        self._pause -= 1
        is_measured = self._num_steps % STEPS_BETWEEN_MEASUREMENTS == STEPS_BETWEEN_MEASUREMENTS // 2
        return not is_measured and (self._pause > 0 or self._num_steps % STEPS_BETWEEN_MEASUREMENTS == 0)

    @property
    def measures_next(self) -> bool:
        """Whether the step after the one that is being planned has drafts whatever they promise."""
        return (self._num_steps + 1) % STEPS_BETWEEN_MEASUREMENTS == STEPS_BETWEEN_MEASUREMENTS // 2

    def choose(self, proposals: Mapping[Sequence, Proposal], num_seqs: int) -> dict[Sequence, tuple[int, ...]]:
        """The drafts to verify out of ``proposals``, in a step of ``num_seqs`` sequences that decode."""
        slots = sorted(
            (-survival, position, number)
            for number, (seq, proposal) in enumerate(proposals.items())
            for position, survival in enumerate(self.rates.survivals(seq, len(proposal.tokens), proposal.chances))
        )
        plain = self.costs.seconds(num_seqs)
        if plain is None or not slots:
            return {}
        is_hopeful = 0 <= self._num_steps % STEPS_BETWEEN_HOPES - STEPS_BETWEEN_HOPES // 2 < HOPEFUL
        is_bold = 0 <= self._num_steps % STEPS_BETWEEN_BOLD - STEPS_BETWEEN_HOPES // 2 < BOLD
        best, best_speed, expected, least = 0, (1 + MARGIN) * num_seqs / plain, float(num_seqs), float("inf")
        for count, (negated, _, _) in enumerate(slots, 1):
            expected -= negated
            seconds = self.drafting_costs.seconds(num_seqs + count, (num_seqs, plain))
            seconds = seconds or self.costs.seconds(num_seqs + count)
            if seconds is not None and is_hopeful:
                least = min(least, seconds) if is_bold else seconds
                seconds = min((seconds + plain) / 2, least)
            if seconds is not None and expected / seconds > best_speed:
                best, best_speed = count, expected / seconds
        if not best and num_seqs >= MANY_SEQS:
            self._pause = PAUSE
        if self.drafter_use is not None and self.drafter_use.is_unsure and num_seqs >= PROBES:
            best = max(best, min(len(slots), PROBES))
        num_measured, phase = divmod(self._num_steps, STEPS_BETWEEN_MEASUREMENTS)
        if phase == STEPS_BETWEEN_MEASUREMENTS // 2:
            best = 1 + num_measured % len(slots)
        counts = [0] * len(proposals)
        for _, _, number in slots[:best]:
            counts[number] += 1
        return {
            seq: proposal.tokens[:count]
            for (seq, proposal), count in zip(proposals.items(), counts, strict=True)
            if count
        }

    def all_pay(self, proposals: Mapping[Sequence, Proposal], room: DraftRoom) -> bool:
        """Whether a mixed step should verify all drafts of ``proposals``: whether the tokens that are expected to be
        accepted take less time there, in the rows of the drafts, than in decode steps of these sequences."""
        num_drafts = sum([len(proposal.tokens) for proposal in proposals.values()])
        plain = self.costs.seconds(len(proposals))
        if plain is None or not 0 < num_drafts <= room.num_drafts:
            return False
        survivals = [
            self.rates.survivals(seq, len(proposal.tokens), proposal.chances) for seq, proposal in proposals.items()
        ]
        saved = sum(map(sum, survivals)) * plain / len(proposals)
        return saved > (1 + MIXED_MARGIN) * num_drafts * room.draft_seconds(num_drafts)

    def learn(self, plan: Plan, sampled: list[Sampled]) -> None:
        """Record which drafts of a committed plan were accepted."""
        if self.drafter_use is not None:
            self.drafter_use.learn(plan, sampled)
        self.rates.fade()
        for item, result in zip(plan, sampled, strict=True):
            if item.samples and result.tokens and not item.is_stale:
                self.rates.learn(item.seq, len(item.drafts), len(result.tokens) - 1)

    def note_step(self, plan: Plan, seconds: float, plain: float | None = None) -> None:
        """Record the duration of a step; see ``DrafterSwitch``."""
        if self.drafter_use is not None:
            self.drafter_use.note_step(plan, seconds, plain)
        if plain is None:
            num_proposed = max([item.num_proposed for item in plan], default=0)
            num_verified = [len(item.drafts) for item in plan]
            if self.drafting_costs is self.costs or not num_proposed:
                self.costs.note(len(plan) + sum(num_verified), seconds)
            elif num_proposed == max(num_verified):  # and not NO_DRAFTER
                self.drafting_costs.note(len(plan) + sum(num_verified), seconds)

    def forget(self, seq: Sequence) -> None:
        """``seq`` has ended."""
        self.rates.forget(seq)


PRIOR, PRIOR_WEIGHT = 0.5, 8.0
"""Rate before anything is known, and the number of drafts that it is worth: fewer would be given up after the
first few that are rejected."""
RATE_WEIGHT = 2.0
"""Number of drafts of a sequence that the rate of all sequences is worth."""
OF_SEQUENCE, OF_ALL = 0.97, 0.999
"""Weight of what is known after one more step, of a sequence and of all sequences. What is forgotten falls back to the
rate of all sequences, and that to ``PRIOR``; so a sequence without drafts is tried again now and then."""


class DraftCounts:
    """Drafts verified and accepted at each position behind the last token; old ones count less."""

    __slots__ = ("accepted", "tried")

    def __init__(self, num_positions: int) -> None:
        self.tried = [0.0] * num_positions
        self.accepted = [0.0] * num_positions

    def forget(self, keep: float) -> None:
        """Multiply all counts by ``keep``."""
        self.tried = [count * keep for count in self.tried]
        self.accepted = [count * keep for count in self.accepted]

    def add(self, num_drafts: int, num_accepted: int) -> None:
        """Record the result of verifying drafts: those behind the first that is rejected are not known."""
        for position in range(min(num_accepted + 1, num_drafts)):
            self.tried[position] += 1
            self.accepted[position] += position < num_accepted

    def rate(self, position: int, prior: float, weight: float) -> float:
        """The share accepted of the drafts at a position whose predecessors were accepted; the prior is worth
        ``weight`` drafts."""
        return (weight * prior + self.accepted[position]) / (weight + self.tried[position])


class AcceptanceRates:
    """The rates of all sequences, and of each."""

    def __init__(self, max_drafts: int) -> None:
        self._max_drafts = max_drafts
        self._of_all = DraftCounts(max_drafts)
        self._of: WeakKeyDictionary[Sequence, DraftCounts] = WeakKeyDictionary()

    def fade(self) -> None:
        """One more step has ended: what is known of all sequences counts a little less."""
        self._of_all.forget(OF_ALL)

    def learn(self, seq: Sequence, num_drafts: int, num_accepted: int) -> None:
        """Record a step of ``seq``, with or without drafts."""
        own = self._of.get(seq)
        if own is None:
            own = self._of[seq] = DraftCounts(self._max_drafts)
        own.forget(OF_SEQUENCE)
        if num_drafts:
            own.add(num_drafts, num_accepted)
            self._of_all.add(num_drafts, num_accepted)

    def survivals(self, seq: Sequence, num_drafts: int, chances: Several[float] = ()) -> list[float]:
        """For each draft, the probability that it and all before it are accepted. ``chances`` are the proposer's
        estimates, each given that the drafts before are accepted."""
        own, survival, found = self._of.get(seq), 1.0, []
        for position in range(num_drafts):
            rate = chances[position] if chances else self._of_all.rate(position, PRIOR, PRIOR_WEIGHT)
            survival *= rate if own is None else own.rate(position, rate, RATE_WEIGHT)
            found.append(survival)
        return found

    def forget(self, seq: Sequence) -> None:
        """``seq`` has ended."""
        self._of.pop(seq, None)
