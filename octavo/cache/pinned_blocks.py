"""Blocks that requests pin: how many, whose pins go when they are too many, and when each pin ends."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable

from octavo.cache.eviction import IdleBlocks
from octavo.cache.node import Node
from octavo.cache.sessions import ByOwner

PINNED_SHARE = 0.5
"""Largest share of the pool that can be pinned."""


class PinnedBlocks:
    """The blocks that are evicted only after all others, each until a time.

    They are at most ``PINNED_SHARE`` of the pool. Beyond that, the API key with the most loses the pins that it set
    first, those at the end of a prefix before those at its start: so of ``n`` keys, each can have an ``n``-th of that
    share, whatever the others do. A block that several keys pin counts for the first of them. Each operation costs
    O(log n) for a block.
    """

    def __init__(self, idle: IdleBlocks, num_blocks: int, clock: Callable[[], float]) -> None:
        self.most = int(PINNED_SHARE * num_blocks)
        self._idle = idle
        self._clock = clock
        self._nodes = ByOwner[Node, None]()
        self._expiring: list[tuple[float, int, Node]] = []
        self._num_notes = 0

    def __len__(self) -> int:
        """The number of blocks, some of which may have expired since the last eviction."""
        return len(self._nodes)

    def counts(self) -> dict[str, int]:
        """The number of blocks that count for each API key."""
        return self._nodes.counts()

    def pin(self, end: Node, until: float, owner: str) -> None:
        """Pin the path to ``end`` for ``owner`` until the time ``until``."""
        self.expire()
        node = end
        while node.parent is not None:
            if node.block >= 0:
                self._pin(node, until, owner)
            node = node.parent
        while len(self._nodes) > self.most:
            self.unpin(self._nodes.surplus()[1])
        if len(self._expiring) > 2 * len(self._nodes) + 16:
            self._expiring = [note for note in self._expiring if self._holds(note)]
            heapq.heapify(self._expiring)

    def _pin(self, node: Node, until: float, owner: str) -> None:
        if until > node.kept_until:
            node.kept_until = until
            if until < math.inf:
                self._num_notes += 1
                heapq.heappush(self._expiring, (until, self._num_notes, node))
        if node.keeper in (None, owner):
            self._nodes.put(owner, node, None)
        if node.keeper is None:
            node.keeper = owner
            self._idle.place_again(node)

    def unpin(self, node: Node) -> None:
        """Evict ``node`` as those that were never pinned."""
        if node.keeper is None:
            return
        self._nodes.remove(node.keeper, node)
        node.keeper, node.kept_until = None, 0.0
        self._idle.place_again(node)

    def expire(self) -> None:
        """Unpin the blocks whose time is over."""
        while self._expiring and self._expiring[0][0] <= self._clock():
            note = heapq.heappop(self._expiring)
            if self._holds(note):
                self.unpin(note[2])

    @staticmethod
    def _holds(note: tuple[float, int, Node]) -> bool:
        until, _, node = note
        return node.keeper is not None and node.kept_until == until

    def check(self, cached: set[Node]) -> None:
        """Assert that the pinned ones are among the nodes ``cached`` and no more than they may be."""
        assert len(self._nodes) <= self.most, "too many blocks are pinned"
        pinned = [node for owner in self.counts() for node, _ in self._nodes.items(owner) if node.keeper == owner]
        assert {node for node in cached if node.keeper is not None} == set(pinned), "pins are miscounted"
        assert len(pinned) == len(self._nodes), "a block is pinned for two"
        ending = {note[2] for note in self._expiring if self._holds(note)}
        assert ending == {node for node in pinned if node.kept_until < math.inf}, "a pin never ends, or one does"
