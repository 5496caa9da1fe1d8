"""How often drafts are accepted, learnt from the results of steps for each position and each sequence."""

from __future__ import annotations

from collections.abc import Sequence as Several
from weakref import WeakKeyDictionary

from octavo.types import Sequence

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
