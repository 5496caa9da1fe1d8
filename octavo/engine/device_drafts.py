"""Drafts of the executor's own drafter, which the deciding side never sees."""

from __future__ import annotations

from octavo.engine.proposer import Proposal
from octavo.types import ON_DEVICE, Sequence


class DeviceDrafts:
    """Schedules what the drafter proposed after the last step of each sequence."""

    def __init__(self, num_drafts: int, num_lookahead: int | None = None) -> None:
        """``num_drafts``: those that the drafter makes for each sequence; ``num_lookahead`` is as many by default."""
        self.num_lookahead = num_drafts if num_lookahead is None else num_lookahead
        self._all = (ON_DEVICE,) * num_drafts

    def propose(self, seq: Sequence, count: int) -> Proposal:
        """See ``Proposer``."""
        return Proposal(self._all[:count])

    def forget(self, seq: Sequence) -> None:
        """Nothing is kept."""
