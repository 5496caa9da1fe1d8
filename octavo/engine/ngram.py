"""N-gram proposer: drafts the tokens that followed the last n-gram at its previous occurrence in the sequence.

The acceptance rate is high where an answer repeats its prompt or itself, as in summaries, edits and code, and low
elsewhere. This is prompt lookup decoding (Saxena 2023, https://github.com/apoorvumang/prompt-lookup-decoding).
"""

from __future__ import annotations

from weakref import WeakKeyDictionary

from octavo.speculative_config import Ngram
from octavo.types import Plan, Sequence, Status


class NgramProposer:
    """Proposes drafts for sequences without pending tokens. Each token of a sequence is indexed once."""

    def __init__(self, settings: Ngram) -> None:
        self.settings = settings
        self._seen: WeakKeyDictionary[Sequence, Seen] = WeakKeyDictionary()

    def propose(self, plan: Plan) -> None:
        """Set ``draft_tokens`` of the sequences in a committed ``plan`` that continue."""
        for item in plan:
            seq = item.seq
            if item.samples and seq.status is Status.RUNNING and not seq.num_in_flight:
                seq.draft_tokens = self._drafts_for(seq)

    def _drafts_for(self, seq: Sequence) -> list[int]:
        seen = self._seen.get(seq)
        if seen is None:
            seen = self._seen[seq] = Seen(self.settings.prompt_lookup_min, self.settings.prompt_lookup_max)
        return seen.continuation(seq.tokens, self.settings.num_speculative_tokens)


class Seen:
    """Last position of each n-gram, of ``least`` to ``most`` tokens, in one growing list.

    N-grams are indexed by hash; a collision only gives drafts that are likely rejected.
    """

    def __init__(self, least: int, most: int) -> None:
        self.lengths = range(most, least - 1, -1)
        self._num_seen = 0
        self._next: dict[int, int] = {}
        """Position after an n-gram, by its hash."""

    def continuation(self, tokens: list[int | None], count: int) -> list[int]:
        """``count`` drafts: the tokens after the previous occurrence of the longest matching last n-gram; or none."""
        last = len(tokens)
        for end in range(self._num_seen + 1, last):  # n-grams at the end are looked up, not indexed
            for length in self.lengths:
                if length <= end:
                    self._next[hash(tuple(tokens[end - length : end]))] = end
        self._num_seen = max(self._num_seen, last - 1)
        for length in self.lengths:
            start = self._next.get(hash(tuple(tokens[last - length :]))) if length < last else None
            if start is not None:
                grown = [token for token in tokens[start : start + count] if token is not None]
                while len(grown) < count:
                    grown.append(grown[len(grown) - (last - start)])  # the draft continues itself
                return grown
        return []
