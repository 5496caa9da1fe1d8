"""Speculation from the text itself: what followed the last tokens when they stood there before.

Where an answer repeats its prompt or itself, as in summaries, edits and code, guesses are right; elsewhere few are.
The idea is prompt lookup (Saxena 2023, https://github.com/apoorvumang/prompt-lookup-decoding).
"""

from __future__ import annotations

from weakref import WeakKeyDictionary

from octavo.speculative_config import Ngram
from octavo.types import Plan, Sequence, Status


class NgramProposer:
    """Guesses for sequences whose last tokens are known. Each token of a sequence is looked at once."""

    def __init__(self, settings: Ngram) -> None:
        self.settings = settings
        self._seen: WeakKeyDictionary[Sequence, Seen] = WeakKeyDictionary()

    def propose(self, plan: Plan) -> None:
        """Set ``draft_tokens`` of the sequences in a committed ``plan`` that go on."""
        for item in plan:
            seq = item.seq
            if item.samples and seq.status is Status.RUNNING and not seq.num_in_flight:
                seq.draft_tokens = self._guess(seq)

    def _guess(self, seq: Sequence) -> list[int]:
        seen = self._seen.get(seq)
        if seen is None:
            seen = self._seen[seq] = Seen(self.settings.prompt_lookup_min, self.settings.prompt_lookup_max)
        return seen.continuation(seq.tokens, self.settings.num_speculative_tokens)


class Seen:
    """Where each run of ``least`` to ``most`` tokens of one growing list stood last.

    Runs are kept by their hash, so a guess can be wrong where two are equal, like any guess.
    """

    def __init__(self, least: int, most: int) -> None:
        self.lengths = range(most, least - 1, -1)
        self._num_seen = 0
        self._next: dict[int, int] = {}
        """Hash of a run to the position after it."""

    def continuation(self, tokens: list[int | None], count: int) -> list[int]:
        """``count`` tokens that may follow, taken from where the longest of the last runs stood before; or none."""
        last = len(tokens)
        for end in range(self._num_seen + 1, last):  # the runs that end with the last token are what is looked for
            for length in self.lengths:
                if length <= end:
                    self._next[hash(tuple(tokens[end - length : end]))] = end
        self._num_seen = max(self._num_seen, last - 1)
        for length in self.lengths:
            start = self._next.get(hash(tuple(tokens[last - length :]))) if length < last else None
            if start is not None:
                grown = [token for token in tokens[start : start + count] if token is not None]
                while len(grown) < count:
                    grown.append(grown[len(grown) - (last - start)])  # as if the guess stood there already
                return grown
        return []
