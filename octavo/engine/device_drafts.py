"""Drafts of the executor's own drafter, which the deciding side never sees."""

from __future__ import annotations

from octavo.engine.proposer import Guess
from octavo.types import ON_DEVICE, Sequence


class DeviceDrafts:
    """Schedules what the drafter proposed after the last step of each sequence."""

    def __init__(self, num_drafts: int) -> None:
        """``num_drafts``: those that the drafter makes for each sequence."""
        self.num_lookahead = num_drafts
        self._all = (ON_DEVICE,) * num_drafts

    def propose(self, seq: Sequence, count: int) -> Guess:
        """See ``Proposer``."""
        return Guess(self._all[:count])

    def forget(self, seq: Sequence) -> None:
        """Nothing is kept."""
