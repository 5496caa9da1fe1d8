"""Texts whose earlier occurrences of a context are found in constant time, by hash chains as in LZ77 compressors.

Every position is linked to the previous one that follows the same two tokens. Adding and removing a token takes
constant time and about eight bytes, besides an entry of a dictionary for each distinct pair.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable

CONTEXT = 2
"""Tokens that two positions must have in common before them to be linked."""
NOTHING = -1
"""No token, and no position."""


class MatchChains:
    """A growing stream of tokens; its oldest part can be dropped. Positions are never reused."""

    def __init__(self) -> None:
        self.first = 0
        """Position of the oldest token that is kept."""
        self._origin = 0
        """Position of the first entry of the arrays; those before ``first`` are dropped now and then."""
        self._tokens = array("i")
        self._previous = array("q")
        self._last: dict[int, int] = {}
        """The last position that follows a pair of tokens, by the hash of the pair and the salt. A collision only gives
        a match that is none."""

    @property
    def end(self) -> int:
        """Position behind the newest token."""
        return self._origin + len(self._tokens)

    def add(self, tokens: Iterable[int], salt: str = "") -> None:
        """Append tokens. ``NOTHING`` separates texts: no context crosses it. Contexts match within a salt only."""
        known, previous, last = self._tokens, self._previous, self._last
        for token in tokens:
            known.append(token)
            previous.append(NOTHING)
            at = len(known) - 1
            if at < CONTEXT or token == NOTHING or known[at - 1] == NOTHING or known[at - 2] == NOTHING:
                continue
            pair, position = hash((salt, known[at - 2], known[at - 1])), self._origin + at
            previous[at] = last.get(pair, NOTHING)
            last[pair] = position

    def drop(self, count: int, salt: str = "") -> None:
        """Remove the oldest ``count`` tokens, which were added with this salt; a constant number of operations each,
        on average."""
        known, last = self._tokens, self._last
        for at in range(self.first - self._origin, self.first - self._origin + count):
            if at >= CONTEXT:
                pair = hash((salt, known[at - 2], known[at - 1]))
                if last.get(pair) == self._origin + at:
                    del last[pair]
        self.first += count
        num_dead = self.first - self._origin
        if num_dead > len(known) // 2 + CONTEXT:
            kept = num_dead - CONTEXT  # contexts of the next tokens to be dropped
            del known[:kept], self._previous[:kept]
            self._origin += kept

    def token(self, position: int) -> int:
        """The token at a position, ``NOTHING`` where none is kept."""
        at = position - self._origin
        return self._tokens[at] if position >= self.first and at < len(self._tokens) else NOTHING

    def matches(self, context: list[int], most: int, salt: str = "") -> list[tuple[int, int]]:
        """The latest ``most`` positions that follow the last tokens of ``context``, latest first, and for each the
        number of tokens before it that equal the end of the context, at least ``CONTEXT``."""
        found: list[tuple[int, int]] = []
        if len(context) < CONTEXT:
            return found
        position = self._last.get(hash((salt, context[-2], context[-1])), NOTHING)
        known, previous, origin, first = self._tokens, self._previous, self._origin, self.first
        longest = len(context)
        while position - CONTEXT >= first and len(found) < most:
            at, length = position - origin, CONTEXT
            reach = min(longest, position - first)
            while length < reach and known[at - 1 - length] == context[longest - 1 - length]:
                length += 1
            found.append((position, length))
            position = previous[at]
        return found
