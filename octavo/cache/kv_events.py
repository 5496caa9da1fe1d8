"""What is cached, told to the world outside: a router sends a prompt to where most of it is."""

from __future__ import annotations

import hashlib
from collections import deque

import msgspec

from octavo.cache.node import Node

MAX_EVENTS = 100_000
"""Events that are kept for whoever takes them; beyond that the oldest are lost, as their numbers show."""


class Stored(msgspec.Struct, frozen=True, tag="stored", gc=False):
    """A block can be found from now on, after the block ``parent`` (0: at the beginning of a prompt)."""

    number: int
    hash: int
    parent: int
    tokens: list[int]
    salt: str = ""


class Removed(msgspec.Struct, frozen=True, tag="removed", gc=False):
    """A block can no longer be found."""

    number: int
    hash: int


KVEvent = Stored | Removed


class KVEvents:
    """Events in the order of their numbers, which count up by one."""

    def __init__(self) -> None:
        self._events: deque[KVEvent] = deque(maxlen=MAX_EVENTS)
        self._number = 0

    def stored(self, node: Node) -> None:
        parent = node.parent
        assert parent is not None
        salt = str(node.edge[0]) if parent.parent is None else ""
        tokens = [token for token in node.edge if isinstance(token, int)]
        node.hash = chain_hash(parent.hash, tokens, salt)
        self._number += 1
        self._events.append(Stored(self._number, node.hash, parent.hash, tokens, salt))

    def removed(self, node: Node) -> None:
        self._number += 1
        self._events.append(Removed(self._number, node.hash))

    def take(self) -> list[KVEvent]:
        """Those that were not taken yet."""
        taken = list(self._events)
        self._events.clear()
        return taken


def chain_hash(parent: int, tokens: list[int], salt: str = "") -> int:
    """The name of a block: 63 bits of SHA-256 over the parent's name, the salt at the beginning, and the tokens.

    All numbers are 8 bytes, little-endian; the salt is UTF-8 after its length. So routers can name prefixes too.
    """
    digest = hashlib.sha256(parent.to_bytes(8, "little"))
    encoded = salt.encode()
    digest.update(len(encoded).to_bytes(8, "little") + encoded)
    digest.update(b"".join(token.to_bytes(8, "little", signed=True) for token in tokens))
    return int.from_bytes(digest.digest()[:8], "little") >> 1
