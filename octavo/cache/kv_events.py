"""KV events: changes of the prefix cache, for routers that send a prompt to the server that caches most of it."""

from __future__ import annotations

import hashlib
import struct
from collections import Counter, deque

import msgspec

from octavo.cache.node import Node, folded

MAX_EVENTS = 100_000
"""Most events kept until ``take``; beyond that the oldest are lost, which leaves a gap in the numbers."""


class Stored(msgspec.Struct, frozen=True, tag="stored", gc=False):
    """A block was cached, after the block ``parent`` (0: at the start of a prompt)."""

    number: int
    hash: int
    parent: int
    tokens: list[int]
    """At the positions of an image, a negative number made of its digest."""
    salt: str = ""


class Removed(msgspec.Struct, frozen=True, tag="removed", gc=False):
    """A block was evicted."""

    number: int
    hash: int


KVEvent = Stored | Removed


class KVEvents:
    """Queue of events with consecutive numbers. Of a block that several ranks cache, only the first and the last change
    is told."""

    def __init__(self) -> None:
        self._num_copies: Counter[int] = Counter()
        """Of each cached block, by its hash."""
        self._events: deque[KVEvent] = deque(maxlen=MAX_EVENTS)
        self._number = 0

    def stored(self, node: Node) -> None:
        parent = node.parent
        assert parent is not None
        salt = str(node.edge[0]) if parent.parent is None else ""
        tokens = [token for token in map(folded, node.edge) if isinstance(token, int)]
        node.hash = chain_hash(parent.hash, tokens, salt)
        self._num_copies[node.hash] += 1
        if self._num_copies[node.hash] == 1:
            self._number += 1
            self._events.append(Stored(self._number, node.hash, parent.hash, tokens, salt))

    def removed(self, node: Node) -> None:
        self._num_copies[node.hash] -= 1
        if not self._num_copies[node.hash]:
            del self._num_copies[node.hash]
            self._number += 1
            self._events.append(Removed(self._number, node.hash))

    def take(self) -> list[KVEvent]:
        """Remove and return all queued events."""
        taken = list(self._events)
        self._events.clear()
        return taken


def chain_hash(parent: int, tokens: list[int], salt: str = "") -> int:
    """The hash of a block: 63 bits of SHA-256 over the parent's hash, the salt (of a first block), and the tokens.

    All numbers are 8 bytes, little-endian; the salt is UTF-8, preceded by its length. Routers can compute it, too.
    """
    digest = hashlib.sha256(parent.to_bytes(8, "little"))
    encoded = salt.encode()
    digest.update(len(encoded).to_bytes(8, "little") + encoded)
    digest.update(struct.pack(f"<{len(tokens)}q", *tokens))
    return int.from_bytes(digest.digest()[:8], "little") >> 1
