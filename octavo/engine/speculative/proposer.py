"""Speculative decoding on the deciding side: where the drafts of a sequence come from."""

from __future__ import annotations

from typing import NamedTuple, Protocol
from weakref import WeakKeyDictionary

from octavo.speculative_config import Ngram
from octavo.types import ON_DEVICE, Sequence


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


class DeviceDrafts:
    """Schedules what the executor's own drafter proposed after the last step of each sequence, tokens not seen here."""

    def __init__(self, num_drafts: int, num_lookahead: int | None = None) -> None:
        """``num_drafts``: those that the drafter makes for each sequence; ``num_lookahead`` is as many by default."""
        self.num_lookahead = num_drafts if num_lookahead is None else num_lookahead
        self._all = (ON_DEVICE,) * num_drafts

    def propose(self, seq: Sequence, count: int) -> Proposal:
        """See ``Proposer``."""
        return Proposal(self._all[:count])

    def forget(self, seq: Sequence) -> None:
        """Nothing is kept."""


# ---- N-gram proposer: drafts the tokens that followed the last n-gram at its previous occurrence in the sequence.
#
# The acceptance rate is high where an answer repeats its prompt or itself, as in summaries, edits and code, and low
# elsewhere. This is prompt lookup decoding (Saxena 2023, https://github.com/apoorvumang/prompt-lookup-decoding).


class NgramProposer:
    """Drafts from the sequence itself. Each token of a sequence is indexed once."""

    num_lookahead = 0

    def __init__(self, settings: Ngram) -> None:
        self.settings = settings
        self._seen: WeakKeyDictionary[Sequence, Seen] = WeakKeyDictionary()

    def propose(self, seq: Sequence, count: int) -> Proposal:
        """See ``Proposer``."""
        seen = self._seen.get(seq)
        if seen is None:
            seen = self._seen[seq] = Seen(self.settings.prompt_lookup_min, self.settings.prompt_lookup_max)
        num_known = len(seq.tokens)
        while seq.tokens[num_known - 1] is None:
            num_known -= 1
        num_pending = len(seq.tokens) - num_known
        return Proposal(tuple(seen.continuation(seq.tokens, num_known, num_pending + count)[num_pending:]))

    def forget(self, seq: Sequence) -> None:
        """See ``Proposer``."""
        self._seen.pop(seq, None)


class Seen:
    """Last position of each n-gram, of ``least`` to ``most`` tokens, in one growing list.

    N-grams are indexed by hash; a collision only gives drafts that are likely rejected.
    """

    def __init__(self, least: int, most: int) -> None:
        self.lengths = range(most, least - 1, -1)
        self._num_seen = 0
        self._next: dict[int, int] = {}
        """Position after an n-gram, by its hash."""

    def continuation(self, tokens: list[int | None], last: int, count: int) -> list[int]:
        """``count`` drafts for position ``last`` and after, or none: what followed the longest matching n-gram before
        ``last`` at its previous occurrence. Tokens before ``last`` are known, and never change."""
        for end in range(self._num_seen + 1, last):  # n-grams at the end are looked up, not indexed
            for length in self.lengths:
                if length <= end:
                    self._next[hash(tuple(tokens[end - length : end]))] = end
        self._num_seen = max(self._num_seen, last - 1)
        for length in self.lengths:
            start = self._next.get(hash(tuple(tokens[last - length : last]))) if length < last else None
            if start is not None:
                grown = [token for token in tokens[start : min(start + count, last)] if token is not None]
                while len(grown) < count:
                    grown.append(grown[len(grown) - (last - start)])  # the draft continues itself
                return grown
        return []
