"""Which prefixes a replica has cached, by the hashes of its blocks: learnt from its KV events, or from a digest.

A prompt matches as many blocks as there are hashes of it, from the first on, among the replica's. ``chain_hash`` covers
the whole prefix and its salt, so no hash is found where the prefix differs.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Container, Iterable, Iterator, Sequence
from itertools import islice

from octavo.cache.kv_events import KVEvent, Stored, chain_hash
from octavo.types import Request

SHORT = (1 << 32) - 1
"""Digests keep the low 32 bits of each hash. Of a million cached blocks, a block that is not among them is taken for
one of them with a probability of 1 in 4,000, which costs one request a worse choice of replica."""
MAX_DIGEST_BLOCKS = 16_384
"""Most blocks in a digest (64 KiB): the newest, as a prefix that is used again is published again."""
MAX_SENT_BLOCKS = 1 << 18
"""Most blocks of prompts that were sent to a replica, some 30 MB: the newest."""


class PromptQuery:
    """A request as a router sees it, with the hashes of its blocks, computed when they are first needed."""

    def __init__(self, tokens: Sequence[int], salt: str = "", session: str = "", tenant: str = "") -> None:
        self.tokens = tokens
        self.salt = salt
        self.session = zlib.crc32(session.encode()) if session else 0
        self.tenant = tenant
        self._hashes: list[int] = []

    @classmethod
    def of(cls, request: Request) -> PromptQuery:
        """The query of a request, which also looks for its output so far."""
        tokens = [*request.prompt_tokens, *request.output_tokens]
        return cls(tokens, request.cache_salt, request.session, request.tenant)

    def hashes(self, block_size: int) -> Iterator[int]:
        """The hashes of its full blocks; the last token is always computed, so its block is not looked for.

        All calls must have the same ``block_size``.
        """
        known = self._hashes
        for index in range((len(self.tokens) - 1) // block_size):
            if index == len(known):
                start = index * block_size
                parent = known[-1] if known else 0
                block = list(self.tokens[start : start + block_size])
                known.append(chain_hash(parent, block, "" if start else self.salt))
            yield known[index]


def num_matched(hashes: Iterable[int], cached: Container[int]) -> int:
    """How many of ``hashes``, from the first on, are cached."""
    count = 0
    for each in hashes:
        if each not in cached:
            break
        count += 1
    return count


class CachedPrefixes:
    """The blocks that one engine process has cached now, from its KV events."""

    def __init__(self) -> None:
        self._hashes: dict[int, None] = {}
        """In the order in which they were stored."""

    def __len__(self) -> int:
        return len(self._hashes)

    def add(self, events: Iterable[KVEvent]) -> None:
        """Apply events, in the order of their numbers."""
        for event in events:
            if isinstance(event, Stored):
                self._hashes[event.hash] = None
            else:
                self._hashes.pop(event.hash, None)

    def clear(self) -> None:
        """The cache was lost with its engine process."""
        self._hashes.clear()

    def num_cached_blocks(self, query: PromptQuery, block_size: int) -> int:
        """How many blocks from the start of a prompt are cached."""
        return num_matched(query.hashes(block_size), self._hashes)

    def digest(self) -> bytes:
        """The low 32 bits of the newest ``MAX_DIGEST_BLOCKS`` hashes."""
        newest = islice(reversed(self._hashes), MAX_DIGEST_BLOCKS)
        return array("I", (each & SHORT for each in newest)).tobytes()


class RemotePrefixes:
    """The blocks that a replica elsewhere has cached, as far as its last digest and the requests sent since tell.

    A prompt that was sent to it counts as cached until a digest comes that is ``patience`` seconds younger: turns of a
    conversation, and prompts that arrive together, meet even where digests are rare.
    """

    def __init__(self, patience: float) -> None:
        self._patience = patience
        self._digest = b""
        self._hashes: frozenset[int] = frozenset()
        self._sent: dict[int, float] = {}
        """Time of the last request with this block, by the low bits of its hash; the oldest first."""

    def update(self, digest: bytes, now: float) -> None:
        """Take a digest that the replica made; ``now`` is the time of its arrival."""
        if digest != self._digest:
            self._digest = digest
            self._hashes = frozenset(array("I", digest))
        self._forget(now)

    def note_sent(self, query: PromptQuery, block_size: int, now: float) -> None:
        """A request was sent there; it will have these blocks soon."""
        for each in query.hashes(block_size):
            self._sent.pop(each & SHORT, None)
            self._sent[each & SHORT] = now
        self._forget(now)

    def _forget(self, now: float) -> None:
        """Leave out what is too old or too much."""
        while self._sent:
            oldest = next(iter(self._sent))
            if len(self._sent) <= MAX_SENT_BLOCKS and now - self._sent[oldest] < self._patience:
                return
            del self._sent[oldest]

    def num_cached_blocks(self, query: PromptQuery, block_size: int) -> int:
        """How many blocks from the start of a prompt are cached there, or about to be."""
        short = (each & SHORT for each in query.hashes(block_size))
        return num_matched(short, self)

    def __contains__(self, short: object) -> bool:
        return short in self._hashes or short in self._sent
