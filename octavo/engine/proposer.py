"""Speculative decoding on the deciding side: where the drafts of a sequence come from."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from octavo.types import Sequence


class Proposal(NamedTuple):
    """Drafts for the next tokens of a sequence."""

    tokens: tuple[int, ...] = ()
    chances: tuple[float, ...] = ()
    """Probability that each is accepted, given that those before it are; empty: the engine uses what it has learnt."""

    def first(self, count: int) -> Proposal:
        """Its first ``count`` drafts."""
        return Proposal(self.tokens[:count], self.chances[:count])


NO_PROPOSAL = Proposal()


class Proposer(Protocol):
    """Proposes drafts. Any draft is allowed: a wrong one is rejected, and costs its row of a step."""

    num_lookahead: int
    """Positions behind a step's rows to which the executor's drafter writes keys and values; 0 without one."""

    def propose(self, seq: Sequence, count: int) -> Proposal:
        """At most ``count`` drafts for positions ``len(seq.tokens)`` and after; called once for each planned step.

        The last entries of ``seq.tokens`` may be ``None``: steps in flight are sampling them, at most so many. The
        proposer predicts these too, and leaves them out of its drafts.
        """
        ...

    def forget(self, seq: Sequence) -> None:
        """``seq`` has ended: what is kept about it alone is dropped."""
        ...
