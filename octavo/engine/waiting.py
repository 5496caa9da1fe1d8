"""Sequences that wait to be admitted."""

from __future__ import annotations

import heapq

from octavo.types import Sequence


class WaitingQueue:
    """A priority queue by ``Sequence.order`` from which any member can also be taken by its id.

    ``remove`` leaves the heap's entry behind until it comes to the top, or until such leftovers are the
    majority and are swept out together. So the heap never holds more than twice what waits, and every
    operation costs O(log n) in the long run.
    """

    def __init__(self) -> None:
        self._by_id: dict[int, Sequence] = {}
        self._heap: list[tuple[tuple[int, ...], Sequence]] = []

    def __len__(self) -> int:
        return len(self._by_id)

    def __contains__(self, request_id: int) -> bool:
        return request_id in self._by_id

    def push(self, seq: Sequence) -> None:
        self._by_id[seq.id] = seq
        heapq.heappush(self._heap, (seq.order, seq))

    def first(self) -> Sequence:
        """The one whose turn it is; the queue must not be empty."""
        while not self._waits(self._heap[0][1]):
            heapq.heappop(self._heap)
        return self._heap[0][1]

    def pop(self) -> Sequence:
        """Take out ``first()``."""
        seq = self.first()
        heapq.heappop(self._heap)
        del self._by_id[seq.id]
        self._sweep()
        return seq

    def remove(self, request_id: int) -> Sequence:
        """Take out the sequence with this id, which must be here."""
        seq = self._by_id.pop(request_id)
        self._sweep()
        return seq

    def _sweep(self) -> None:
        if len(self._heap) > 2 * len(self._by_id):
            self._heap = [entry for entry in self._heap if self._waits(entry[1])]
            heapq.heapify(self._heap)

    def _waits(self, seq: Sequence) -> bool:
        return self._by_id.get(seq.id) is seq

    def check(self) -> None:
        """Assert that every member has exactly one entry, and that leftovers are bounded."""
        entries = [seq for _, seq in self._heap if self._waits(seq)]
        assert len(entries) == len(self._by_id), "a waiting sequence has no entry in the heap, or two"
        assert len(self._heap) <= 2 * len(self._by_id), "leftovers pile up"
        for seq in entries:
            assert not seq.block_table, "a waiting sequence holds blocks"
            assert not seq.num_in_flight, "a waiting sequence is in flight"
            assert not seq.draft_tokens, "a waiting sequence keeps old drafts"
