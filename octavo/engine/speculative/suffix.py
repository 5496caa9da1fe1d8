"""Suffix decoding: drafts what followed the longest match of the last tokens, in the sequence or in earlier answers.

After Oliaro et al., arXiv 2411.04975. Longer matches give more drafts. Where the context occurred several times, the
draft follows the majority, and its length the share that agrees. The latest occurrences alone are looked at, so that a
draft takes constant time, and texts are indexed by ``MatchChains``, in constant time a token.
"""

from __future__ import annotations

from array import array
from collections import Counter, deque
from collections.abc import Iterable
from typing import NamedTuple
from weakref import WeakKeyDictionary

from octavo.engine.speculative.proposer import NO_PROPOSAL, Proposal
from octavo.speculative_config import Suffix
from octavo.types import Sequence

MOST_MATCHES = 8
"""Occurrences of a context that are looked at."""
MOST_SHARED_TOKENS = 1 << 19
"""Tokens of earlier answers that are kept, whatever their number: at most some 70 MB."""
MOST_INDEXED = 1 << 13
"""Tokens of a sequence that are indexed in one step: longer prompts take several, so that none is delayed."""


class Draft(NamedTuple):
    """A continuation, with the share of occurrences that agree on each token, and the matched length before it."""

    tokens: list[int]
    shares: list[float]
    length: int
    score: float
    """Expected number of accepted tokens if the shares were probabilities."""


NO_DRAFT = Draft([], [], 0, 0.0)


class SuffixProposer:
    """Drafts from the sequence itself and from the answers to earlier requests with the same ``cache_salt``."""

    num_lookahead = 0

    def __init__(self, settings: Suffix) -> None:
        self.settings = settings
        self.earlier = RecentAnswers(settings.suffix_decoding_max_cached_requests)
        self.rates = HitRates()
        self._own: WeakKeyDictionary[Sequence, MatchChains] = WeakKeyDictionary()

    def propose(self, seq: Sequence, count: int) -> Proposal:
        """See ``Proposer``."""
        own = self._own.get(seq)
        if own is None:
            own = self._own[seq] = MatchChains()
        num_known = len(seq.tokens)
        while seq.tokens[num_known - 1] is None:
            num_known -= 1
        new: list[int] = seq.tokens[own.end : min(num_known, own.end + MOST_INDEXED)]  # type: ignore[assignment]
        own.add(new)
        num_pending = len(seq.tokens) - num_known
        context: list[int] = seq.tokens[max(0, num_known - self._depth) : num_known]  # type: ignore[assignment]
        self.rates.check(seq, seq.tokens)
        draft = self.best(own, context, num_pending + count, seq.request.cache_salt)
        if len(draft.tokens) <= num_pending:
            return NO_PROPOSAL
        chances = self.rates.expect(seq, num_known, draft.tokens, draft.shares, draft.length)
        pending = 1.0
        for chance in chances[:num_pending]:
            pending *= chance
        rest = chances[num_pending:]
        return Proposal(tuple(draft.tokens[num_pending:]), (pending * rest[0], *rest[1:]))

    @property
    def _depth(self) -> int:
        return self.settings.suffix_decoding_max_tree_depth

    def best(self, own: MatchChains, context: list[int], count: int, salt: str) -> Draft:
        """The better one of the drafts from the sequence's own tokens and from earlier answers."""
        drafts = [self._draft(own, context, count, ""), self._draft(self.earlier.chains, context, count, salt)]
        return max(drafts, key=lambda draft: draft.score)

    def _draft(self, chains: MatchChains, context: list[int], count: int, salt: str) -> Draft:
        """The draft with the largest score over all lengths of the context."""
        matches = chains.matches(context, MOST_MATCHES, salt)
        best = NO_DRAFT
        for length in sorted({length for _, length in matches}, reverse=True):
            most = min(count, int(length * self.settings.suffix_decoding_max_spec_factor))
            if best.score >= most:
                break
            places = [position for position, matched in matches if matched >= length]
            draft = self._walk(chains, places, length, most)
            if draft.score > best.score:
                best = draft
        return best

    def _walk(self, chains: MatchChains, places: list[int], length: int, most: int) -> Draft:
        """Follow the majority of what is found at ``places``, for at most ``most`` tokens."""
        tokens: list[int] = []
        shares: list[float] = []
        score, survival, end = 0.0, 1.0, chains.end
        while len(tokens) < most:
            ahead = len(tokens)
            found = [
                tokens[place + ahead - end] if place + ahead >= end else chains.token(place + ahead) for place in places
            ]
            token, num_agreeing = found[0], 1
            if len(found) > 1:
                token, num_agreeing = Counter(found).most_common(1)[0]
            share = num_agreeing / len(found)
            survival *= share
            if token == NOTHING or survival < self.settings.suffix_decoding_min_token_prob:
                break
            tokens.append(token)
            shares.append(share)
            score += survival
            if num_agreeing < len(found):
                places = [place for place, other in zip(places, found, strict=True) if other == token]
        return Draft(tokens, shares, length, score)

    def forget(self, seq: Sequence) -> None:
        """See ``Proposer``; the answer is kept for later requests."""
        self._own.pop(seq, None)
        self.rates.forget(seq)
        answer = [token for token in seq.tokens[seq.num_prompt_tokens :] if token is not None]
        self.earlier.add(answer, seq.request.cache_salt)


class RecentAnswers:
    """The last answers, in bounded memory."""

    def __init__(self, most: int, most_tokens: int = MOST_SHARED_TOKENS) -> None:
        """``most``: answers that are kept; 0 keeps none."""
        self.chains = MatchChains()
        self._most, self._most_tokens = most, most_tokens
        self._kept: deque[tuple[int, str]] = deque()
        """Length and salt of each, oldest first."""

    def add(self, answer: list[int], salt: str) -> None:
        """Keep an answer; the oldest ones are dropped."""
        answer = answer[-self._most_tokens + 1 :]
        if not self._most or not answer:
            return
        self.chains.add([*answer, NOTHING], salt)
        self._kept.append((len(answer) + 1, salt))
        while len(self._kept) > self._most or self.chains.end - self.chains.first > self._most_tokens:
            self.chains.drop(*self._kept.popleft())


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
