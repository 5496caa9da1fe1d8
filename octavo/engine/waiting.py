"""Sequences that wait to be admitted."""

from __future__ import annotations

import heapq

from octavo.types import Order, Sequence

Entry = tuple[Order, int, Sequence]
"""A heap entry. The number breaks ties between entries of one sequence, of which only the latest is valid."""


class WaitingQueue:
    """A priority queue by ``Sequence.order`` from which any member can also be taken by its id.

    ``remove`` and ``move`` leave a stale heap entry, which is dropped when it reaches the top, or when stale entries
    are the majority and the heap is rebuilt. So a heap never has more than two entries per waiting sequence, and
    every operation costs amortized O(log n). The shortest sequence is found in a second heap.
    """

    def __init__(self) -> None:
        self._entry_of: dict[int, Entry] = {}
        self._heap: list[Entry] = []
        self._by_length: list[tuple[int, Entry]] = []
        """The same entries, as a heap by the number of tokens."""
        self._num_entries = 0

    def __len__(self) -> int:
        return len(self._entry_of)

    def __contains__(self, request_id: int) -> bool:
        return request_id in self._entry_of

    def push(self, seq: Sequence) -> None:
        self._num_entries += 1
        entry = self._entry_of[seq.id] = (seq.order, self._num_entries, seq)
        heapq.heappush(self._heap, entry)
        heapq.heappush(self._by_length, (len(seq.tokens), entry))

    def first(self) -> Sequence:
        """The sequence that is next; the queue must not be empty."""
        while not self._counts(self._heap[0]):
            heapq.heappop(self._heap)
        return self._heap[0][2]

    def shortest(self) -> Sequence:
        """The sequence with the fewest tokens; the queue must not be empty."""
        while not self._counts(self._by_length[0][1]):
            heapq.heappop(self._by_length)
        return self._by_length[0][1][2]

    def remove(self, request_id: int) -> Sequence:
        """Remove and return the sequence with this id, which must be in the queue."""
        seq = self._entry_of.pop(request_id)[2]
        self._sweep()
        return seq

    def move(self, seq: Sequence, order: Order) -> None:
        """Change the order of ``seq``, which must be in the queue."""
        if order != seq.order:
            seq.order = order
            self.push(seq)
            self._sweep()

    def _sweep(self) -> None:
        entries = self._entry_of.values()
        if len(self._heap) > 2 * len(entries):
            self._heap = list(entries)
            heapq.heapify(self._heap)
        if len(self._by_length) > 2 * len(entries):
            self._by_length = [(len(entry[2].tokens), entry) for entry in entries]
            heapq.heapify(self._by_length)

    def _counts(self, entry: Entry) -> bool:
        return self._entry_of.get(entry[2].id) is entry

    def check(self) -> None:
        """Assert that every member has exactly one valid entry, and that stale entries are bounded."""
        members = [entry[2] for entry in self._heap if self._counts(entry)]
        assert len(members) == len(self._entry_of), "a waiting sequence is not in the heap"
        assert len(self._heap) <= 2 * len(self._entry_of), "too many stale entries in the heap"
        assert len(self._by_length) <= 2 * len(self._entry_of), "too many stale entries in the heap by length"
        lengths = [len(seq.tokens) for seq in members]
        assert not members or len(self.shortest().tokens) == min(lengths), "another sequence is the shortest"
        for seq in members:
            assert not any(held.block_table for held in seq.groups), "a waiting sequence holds blocks"
            assert not seq.num_in_flight, "a waiting sequence is in flight"
