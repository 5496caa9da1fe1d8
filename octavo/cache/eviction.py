"""Which idle block is given up first.

Only leaves of the tree can go, for a child without its parent could never be found. A policy is a key: the leaf with
the smallest goes first, and its parent, if that is idle too, is a leaf then. All policies share one heap, in which
an idle path of any length has one entry; so every operation costs O(log n) in the long run, whatever the policy.
Where a window lets a child be found without its parent, every idle block can go. Those that the only sequence which
ever wanted them has left behind go first: it is found again by its last window, and they are of use only to one that
would go on from the middle of its text.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from collections.abc import Callable

from octavo.cache.node import Node

Key = tuple[float, ...]


def lru(node: Node) -> Key:
    """Least recently used: held longest ago."""
    return (node.rested,)


def fifo(node: Node) -> Key:
    """First in, first out: cached longest ago."""
    return (node.born,)


def lfu(node: Node) -> Key:
    """Least frequently used; among equals, least recently."""
    return (node.uses, node.rested)


def slru(node: Node) -> Key:
    """Segmented LRU (Karedla et al. 1994): what was used once goes before what was used again."""
    return (node.is_protected, node.rested)


def session(node: Node) -> Key:
    """What a conversation left behind when it went on another way goes first, then by LRU."""
    return (not node.is_superseded, node.rested)


POLICIES: dict[str, Callable[[Node], Key]] = {policy.__name__: policy for policy in (lru, fifo, lfu, slru, session)}

PROTECTED_SHARE = 0.8
"""Of the pool, at most so much is protected under slru; beyond that the least recently used of it loses its rank."""


Entry = tuple[Key, int, Node]
"""A leaf's place in the heap; it counts as long as it is the node's ``entry``."""


class IdleBlocks:
    """The nodes whose blocks nobody holds."""

    def __init__(self, policy: str, num_blocks: int, clock: Callable[[], float], *, leaves_only: bool = True) -> None:
        self.key = POLICIES[policy]
        self.leaves_only = leaves_only
        self.clock = clock
        self._num_idle = 0
        self._num_rests = 0
        self._heap: list[Entry] = []
        self._num_entries = 0
        """Of the heap's entries, those that count."""
        self._num_placed = 0
        self._expiring: list[tuple[float, int, Node]] = []
        self._protected: OrderedDict[Node, None] | None = OrderedDict() if policy == "slru" else None
        self._max_protected = int(PROTECTED_SHARE * num_blocks)

    def __len__(self) -> int:
        return self._num_idle

    def add(self, node: Node) -> None:
        """``node`` is idle from now on; so are all below it."""
        self._num_idle += 1
        self._num_rests += 1
        node.is_idle = True
        node.rested = self._num_rests
        if self._protected is not None and node.uses > 1:
            self._protect(node, self._protected)
        if not (self.leaves_only and node.children):
            self.place(node)

    def remove(self, node: Node) -> None:
        """``node`` is held again."""
        self._num_idle -= 1
        node.is_idle = False
        self._displace(node)
        if self._protected is not None:
            self._protected.pop(node, None)

    def pop(self) -> Node:
        """Take out the one to be given up; there must be one. Its parent is to be placed if it is a leaf then."""
        self._expire()
        while True:
            entry = heapq.heappop(self._heap)
            node = entry[2]
            if node.entry is entry:
                self.remove(node)
                return node

    def place(self, node: Node) -> None:
        """Give ``node``, which is idle and can go, its place by its key as of now."""
        self._displace(node)
        self._num_placed += 1
        is_kept = node.kept_until > self.clock() if node.kept_until else False
        rank = 1 if is_kept else -1 if node.is_passed else 0
        node.entry = ((rank, *self.key(node)), self._num_placed, node)
        heapq.heappush(self._heap, node.entry)
        self._num_entries += 1
        if is_kept and node.kept_until < math.inf:
            self._note_expiry(node)

    def _note_expiry(self, node: Node) -> None:
        heapq.heappush(self._expiring, (node.kept_until, self._num_placed, node))
        if len(self._expiring) > 2 * self._num_entries + 16:
            self._expiring = [note for note in self._expiring if self._still_holds(note)]
            heapq.heapify(self._expiring)

    @staticmethod
    def _still_holds(note: tuple[float, int, Node]) -> bool:
        _, number, node = note
        return node.entry is not None and node.entry[1] == number

    def _displace(self, node: Node) -> None:
        if node.entry is not None:
            node.entry = None
            self._num_entries -= 1
            if len(self._heap) > 2 * self._num_entries + 16:
                self._heap = [entry for entry in self._heap if entry[2].entry is entry]
                heapq.heapify(self._heap)

    def _expire(self) -> None:
        """Give those whose time is over the place that they have without it."""
        while self._expiring and self._expiring[0][0] <= self.clock():
            note = heapq.heappop(self._expiring)
            if self._still_holds(note):
                self.place(note[2])

    def _protect(self, node: Node, protected: OrderedDict[Node, None]) -> None:
        node.is_protected = True
        protected[node] = None
        if len(protected) > self._max_protected:
            oldest, _ = protected.popitem(last=False)
            oldest.is_protected = False
            if oldest.entry is not None:
                self.place(oldest)

    def check(self, leaves: set[Node]) -> None:
        """Assert that ``leaves``, or all that are idle where these can go, are what can be given up."""
        placed = {entry[2] for entry in self._heap if entry[2].entry is entry}
        assert placed == leaves, "an idle leaf has no place in the heap, or something else has one"
        assert len(placed) == self._num_entries, "places are miscounted"
        assert len(self._heap) <= 2 * self._num_entries + 16, "leftovers pile up"
        assert sum(map(self._still_holds, self._expiring)) <= self._num_entries, "a hint is noted twice"
