"""How often drafts of matched contexts are right, learnt by comparing each draft with the text that follows.

Every draft teaches, also those that no step verifies: so it is known, without cost, what verifying them would give.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary

from octavo.types import Sequence

LONGEST = 16
"""Matches of so many tokens or more are one class."""
NUM_SHARES = 4
"""Classes of the share of occurrences that agree."""
PRIOR_WEIGHT = 4.0
KEEP = 0.995
"""Weight of the older counts of a class after one more."""

Key = tuple[int, int]


class HitRates:
    """The share of right drafts by the length of the match before them, and the share of occurrences that agree."""

    def __init__(self) -> None:
        self._counts: dict[Key, list[float]] = {}
        """Right and all drafts of a class."""
        self._open: WeakKeyDictionary[Sequence, tuple[int, list[int], list[Key]]] = WeakKeyDictionary()
        """The last draft of each sequence that is not compared yet: its position, tokens and classes."""

    def expect(
        self, seq: Sequence, position: int, tokens: list[int], shares: list[float], length: int
    ) -> tuple[float, ...]:
        """The probability that each token of a draft is right if those before it are. The draft, of tokens at
        ``position`` and after, is compared with the text later."""
        keys = [_class_of(length + index, share) for index, share in enumerate(shares)]
        self._open.setdefault(seq, (position, tokens, keys))
        return tuple([self._rate(key) for key in keys])

    def check(self, seq: Sequence, text: list[int | None]) -> None:
        """Learn from what is known of ``text`` since the last draft."""
        if (last := self._open.get(seq)) is None:
            return
        position, tokens, keys = last
        if position >= len(text) or text[position] is None:
            return
        del self._open[seq]
        for token, key, found in zip(tokens, keys, text[position:], strict=False):
            if found is None:
                break
            counts = self._counts.setdefault(key, [0.0, 0.0])
            counts[0] = counts[0] * KEEP + (token == found)
            counts[1] = counts[1] * KEEP + 1
            if token != found:
                break

    def forget(self, seq: Sequence) -> None:
        """``seq`` has ended."""
        self._open.pop(seq, None)

    def _rate(self, key: Key) -> float:
        length, share = key
        prior = length / (length + 2) * (share + 1) / NUM_SHARES
        right, tried = self._counts.get(key, (0.0, 0.0))
        return (PRIOR_WEIGHT * prior + right) / (PRIOR_WEIGHT + tried)


def _class_of(length: int, share: float) -> Key:
    return min(length, LONGEST), min(int(share * NUM_SHARES), NUM_SHARES - 1)
