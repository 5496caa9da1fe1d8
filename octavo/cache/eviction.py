"""Eviction policies: which idle block is evicted first.

Only leaves of the tree can be evicted, since a child without its parent could never be matched. A policy is a key: the
leaf with the smallest is evicted first, and its parent, if idle, may then be a leaf. All policies share one heap, in
which an idle path of any length has one entry; every operation costs amortized O(log n).

In sliding-window groups a child can be matched without its parent, so every idle block can be evicted. Blocks that
were used by one sequence only and are behind its window go first: that sequence is matched by its last window, and
they would serve only a request that continues from the middle of its text.

Blocks that requests pin go last, whatever the policy: see ``pinned_blocks.py``.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable

from octavo.cache.node import Node

Key = tuple[float, ...]


def lru(node: Node) -> Key:
    """Least recently used: released longest ago."""
    return (node.rested,)


def fifo(node: Node) -> Key:
    """First in, first out: cached longest ago."""
    return (node.born,)


def lfu(node: Node) -> Key:
    """Least frequently used; among equals, least recently used."""
    return (node.uses, node.rested)


def slru(node: Node) -> Key:
    """Segmented LRU (Karedla et al. 1994): blocks used once go before blocks used repeatedly."""
    return (node.is_protected, node.rested)


def session(node: Node) -> Key:
    """Blocks of abandoned branches of a conversation first, then LRU."""
    return (not node.is_superseded, node.rested)


POLICIES: dict[str, Callable[[Node], Key]] = {policy.__name__: policy for policy in (lru, fifo, lfu, slru, session)}

PROTECTED_SHARE = 0.8
"""Largest share of the pool that slru protects; beyond it the least recently used protected block is demoted."""

Entry = tuple[Key, int, Node]
"""A heap entry of an evictable node; valid while it is the node's ``entry``."""


class IdleBlocks:
    """The nodes whose blocks no sequence holds."""

    def __init__(self, policy: str, num_blocks: int, *, leaves_only: bool = True) -> None:
        self.key = POLICIES[policy]
        self.leaves_only = leaves_only
        self._num_idle = 0
        self._num_rests = 0
        self._heap: list[Entry] = []
        self._num_entries = 0
        """Valid entries of the heap."""
        self._num_placed = 0
        self._protected: OrderedDict[Node, None] | None = OrderedDict() if policy == "slru" else None
        self._max_protected = int(PROTECTED_SHARE * num_blocks)

    def __len__(self) -> int:
        return self._num_idle

    def add(self, node: Node) -> None:
        """Add ``node``, whose block became idle."""
        self._num_idle += 1
        self._num_rests += 1
        node.is_idle = True
        node.rested = self._num_rests
        if self._protected is not None and node.uses > 1:
            self._protect(node, self._protected)
        if not (self.leaves_only and node.children):
            self.place(node)

    def remove(self, node: Node) -> None:
        """Remove ``node``, whose block is held again or evicted."""
        self._num_idle -= 1
        node.is_idle = False
        self._displace(node)
        if self._protected is not None:
            self._protected.pop(node, None)

    def pop(self) -> Node:
        """Remove and return the node to evict; there must be one. If its parent is then an idle leaf, the caller must
        ``place`` it."""
        while True:
            entry = heapq.heappop(self._heap)
            node = entry[2]
            if node.entry is entry:
                self.remove(node)
                return node

    def place(self, node: Node) -> None:
        """Insert ``node``, which is idle and evictable, into the heap by its current key, replacing any older entry."""
        self._displace(node)
        self._num_placed += 1
        rank = 1 if node.keeper is not None else -1 if node.is_passed else 0
        node.entry = ((rank, *self.key(node)), self._num_placed, node)
        heapq.heappush(self._heap, node.entry)
        self._num_entries += 1

    def place_again(self, node: Node) -> None:
        """Place ``node`` by its current key, if it is evictable."""
        if node.entry is not None:
            self.place(node)

    def _displace(self, node: Node) -> None:
        if node.entry is not None:
            node.entry = None
            self._num_entries -= 1
            if len(self._heap) > 2 * self._num_entries + 16:
                self._heap = [entry for entry in self._heap if entry[2].entry is entry]
                heapq.heapify(self._heap)

    def _protect(self, node: Node, protected: OrderedDict[Node, None]) -> None:
        node.is_protected = True
        protected[node] = None
        if len(protected) > self._max_protected:
            oldest, _ = protected.popitem(last=False)
            oldest.is_protected = False
            self.place_again(oldest)

    def check(self, leaves: set[Node]) -> None:
        """Assert that the evictable nodes are ``leaves`` (all idle nodes in sliding-window groups)."""
        placed = {entry[2] for entry in self._heap if entry[2].entry is entry}
        assert placed == leaves, "an idle leaf has no place in the heap, or something else has one"
        assert len(placed) == self._num_entries, "places are miscounted"
        assert len(self._heap) <= 2 * self._num_entries + 16, "too many stale entries in the heap"
