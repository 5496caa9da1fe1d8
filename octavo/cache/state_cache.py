"""Slots of recurrent state: which sequence holds which, and of which prefixes the prefix cache keeps a snapshot.

Layers with recurrent state keep a fixed number of numbers for each sequence. A *slot* has room for those of all
layers. A sequence holds the slot of its current state, which its steps update in place. As a state cannot be cut back,
prefixes can be reused only where a *snapshot* of it was taken: a copy in another slot, attached to a node of the prefix
tree::

    tokens        0 ......... 64 ........ 128 ....... 192 ... 210
    blocks of KV  a  a  a  a  a  a  a  a  a  a  a  a  a  .        a sequence that is computed up to 210
    states                    s           s           s     c     snapshots, and its current state

Snapshots are taken at multiples of ``interval``: where the tokens known at admission end, where they leave what other
sequences have computed, every ``every`` tokens of long prompts, and at the newest multiple in the output, which
replaces the one before. At the end of a step they are copies; within a chunk, where the device can, the step itself
writes them to slots that are taken when it is planned. They belong to the sequence until the tokens before them are
committed.

A slot is in exactly one of four states::

    FREE --> current or spare, held by a sequence --> FREE
    FREE --> pending, held by a sequence --> snapshot, attached to a node --> FREE, when it is evicted

Snapshots are evicted by what they save (GreedyDual-Size, Cao and Irani 1997): all have the same size, so the one whose
tokens since the snapshot before it, times its uses, are the fewest, aged by what has been evicted since.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from collections.abc import Sequence as Several

from octavo.cache.node import Node
from octavo.cache.offload import Offload
from octavo.cache.offload_tiers import Content
from octavo.cache.radix_tree import RadixTree
from octavo.steps.limits import StateSize
from octavo.types import HeldState, Sequence

MOST_MARKS = 32
"""Snapshots that a step takes within a sequence's chunk, and at most a quarter of all for each sequence: until they are
committed they cannot be evicted, whatever they save."""
CopyState = Callable[[int, int], None]
"""Copies the state of one slot to another, behind all steps submitted before."""


class Snapshot:
    """A state in the prefix cache; ``entry`` is its valid entry in the eviction heap."""

    __slots__ = ("entry", "node", "num_saved", "slot", "uses")

    def __init__(self, node: Node, slot: int, num_saved: int) -> None:
        self.node, self.slot, self.num_saved = node, slot, num_saved
        self.uses = 1
        self.entry: Entry | None = None


Entry = tuple[float, int, Snapshot]


class StateCache:
    """The slots of recurrent state; see ``KVCache``, which calls it along with the first group's blocks."""

    def __init__(self, size: StateSize, tree: RadixTree, enable_prefix_caching: bool = True) -> None:
        self.size = size
        self.block_size = tree.block_size
        self.interval = math.lcm(size.interval, tree.block_size)
        self.every = -(-size.every // self.interval) * self.interval
        self.tree = tree
        tree.on_evict = self.forget
        self.offload: Offload | None = None
        """Slower tiers that keep evicted snapshots."""
        self.copy: CopyState = lambda source, target: None
        self.most_pending = size.num_slots - size.num_held if enable_prefix_caching else 0
        self.most_marks = max(1, min(MOST_MARKS, self.most_pending // 4)) if size.has_marks else 0
        assert size.num_slots >= size.num_held, "there are fewer slots than running sequences need"
        self.num_pending = 0
        self.num_snapshots = 0
        self.num_evicted = 0
        self.num_hits = 0
        """Times that a sequence began with a snapshot."""
        self._free = list(range(size.num_slots - 1, -1, -1))
        self._heap: list[Entry] = []
        self._num_placed = 0
        self._age = 0.0

    @property
    def num_used(self) -> int:
        """Slots held by sequences."""
        return self.size.num_slots - len(self._free) - self.num_snapshots

    # ---- prefixes

    def match(self, end: Node) -> Node:
        """The last node with a snapshot on the path to ``end``, or the root."""
        while end.parent is not None and end.snapshot is None:
            end = end.parent
        return end

    def start(self, seq: Sequence, end: Node, branch: int) -> None:
        """Give ``seq`` its slots, with a copy of the state at ``end``, from ``match``.

        ``branch``: positions of it that have keys and values in the prefix cache.
        """
        snapshot: Snapshot | None = end.snapshot
        if snapshot is not None:
            self.num_hits += 1
            snapshot.uses += 1
            self._place(snapshot)
        slot = self._take()
        if snapshot is not None and snapshot.slot != slot:  # it is the same if the snapshot had to go
            self.copy(snapshot.slot, slot)
        spare = self._take() if self.size.has_drafts else -1
        seq.state = HeldState(slot, spare, len(seq.tokens), branch - branch % self.interval)

    def restore(self, seq: Sequence, content: Content) -> None:
        """Fill the state of ``seq``, which has just started, with one from slower tiers; it becomes a snapshot, too."""
        assert seq.state is not None
        assert self.offload is not None
        write = self.offload.store.write_state
        write(seq.state.slot, content)
        self.num_hits += 1
        self.offload.stats.num_restored += 1
        if self.num_pending < self.most_pending:  # attached once a step is committed, behind which it was written
            slot = self._take()
            write(slot, content)
            seq.state.pending.append((seq.num_computed_tokens, slot))
            self.num_pending += 1

    # ---- running sequences

    def room(self, seq: Sequence) -> int:
        """Positions of ``seq`` before the next one at which its step has to end, as a snapshot is taken there."""
        end = self._next_stop(seq.state, seq.num_computed_tokens)
        for _ in range(self.most_marks):
            if end >= len(seq.tokens):
                break
            end = self._next_stop(seq.state, end)
        return end - seq.num_computed_tokens

    def mark(self, seq: Sequence, end: int) -> tuple[tuple[int, int], ...]:
        """Take the snapshots that are due within the step that is being planned, which computes ``seq`` up to ``end``;
        returns ``Scheduled.marks``."""
        state, marks = seq.state, list[tuple[int, int]]()
        position = self._next_stop(state, seq.num_computed_tokens)
        while position < end and len(marks) < self.most_marks and self.num_pending < self.most_pending:
            marks.append((position, self._take()))
            self.num_pending += 1
            position = self._next_stop(state, position)
        if marks and state is not None:
            state.pending += marks
        return tuple(marks)

    def _next_stop(self, state: HeldState | None, start: int) -> int:
        interval = self.interval
        assert state is not None, "a running sequence has no state"
        last = (state.known - 1) // interval * interval
        if start >= last:
            return (start // interval + 1) * interval
        stop = min(last, (start // self.every + 1) * self.every)
        return min(stop, state.branch) if state.branch > start else stop

    def note_submitted(self, seq: Sequence, end: int) -> None:
        """Take a snapshot behind the step just submitted, which computes ``seq`` up to ``end``, if one is due there."""
        if end % self.interval or self.num_pending >= self.most_pending or seq.state is None:
            return
        state = seq.state
        last = (state.known - 1) // self.interval * self.interval
        if end < last and end % self.every and end != state.branch:
            return
        slot = self._take()
        self.copy(state.slot, slot)
        state.pending.append((end, slot))
        self.num_pending += 1

    def publish(self, seq: Sequence, num_tokens: int, published: Node) -> None:
        """Attach the snapshots of ``seq`` among its first ``num_tokens`` positions, all committed, to the tree, where
        ``published`` is its last node."""
        state = seq.state
        while state is not None and state.pending and state.pending[0][0] <= num_tokens:
            position, slot = state.pending.pop(0)
            self.num_pending -= 1
            node = published.above(position // self.block_size)
            assert node.depth * self.block_size == position, "a snapshot was committed before its blocks"
            self._attach(state, node, position, slot)

    def _attach(self, state: HeldState, node: Node, position: int, slot: int) -> None:
        if node.snapshot is not None:
            self._free.append(slot)
            return
        assert node.parent is not None, "a snapshot of nothing"
        before = self.match(node.parent)
        snapshot = node.snapshot = Snapshot(node, slot, position - before.depth * self.block_size)
        self.num_snapshots += 1
        self._place(snapshot)
        if self.offload is not None:
            self.offload.note(node, is_state=True)
        if position > state.known:
            old: Snapshot | None = state.rolling
            if old is not None and old.node.snapshot is old and old.uses == 1:
                snapshot.num_saved += old.num_saved
                self._place(snapshot)
                self._drop(old)
            state.rolling = snapshot if position % self.every else None

    def checkpoint(self, seq: Sequence) -> None:
        """Keep the state of ``seq`` before the step that is being planned, which verifies drafts."""
        assert seq.state is not None
        self.copy(seq.state.slot, seq.state.spare)

    def roll_back(self, seq: Sequence) -> None:
        """Return ``seq`` to its last ``checkpoint``, after which only one step was submitted."""
        state = seq.state
        assert state is not None
        state.slot, state.spare = state.spare, state.slot
        self._drop_pending(state)

    def lose(self, seq: Sequence) -> None:
        """Record that a step failed that may have changed the state of ``seq``."""
        assert seq.state is not None
        seq.state.is_lost = True
        self._drop_pending(seq.state)

    def release(self, seq: Sequence) -> None:
        """Free the slots of ``seq``; its snapshots in the tree stay."""
        if seq.state is not None:
            self._drop_pending(seq.state)
            self._free += [slot for slot in (seq.state.slot, seq.state.spare) if slot >= 0]
            seq.state = None

    def _drop_pending(self, state: HeldState) -> None:
        self._free += [slot for _, slot in state.pending]
        self.num_pending -= len(state.pending)
        state.pending.clear()

    # ---- slots

    def _take(self) -> int:
        """A free slot, for which a snapshot is evicted if necessary; there must be one or the other."""
        while not self._free:
            entry = heapq.heappop(self._heap)
            if entry[2].entry is entry:
                self._age = entry[0]
                self.num_evicted += 1
                self._evict(entry[2])
        return self._free.pop()

    def _place(self, snapshot: Snapshot) -> None:
        self._num_placed += 1
        snapshot.entry = (self._age + snapshot.uses * snapshot.num_saved, self._num_placed, snapshot)
        heapq.heappush(self._heap, snapshot.entry)
        if len(self._heap) > 2 * self.num_snapshots + 16:
            self._heap = [entry for entry in self._heap if entry[2].entry is entry]
            heapq.heapify(self._heap)

    def _evict(self, snapshot: Snapshot) -> None:
        if self.offload is not None:
            self.offload.save_state(snapshot.node, snapshot.slot)
        self._drop(snapshot)

    def _drop(self, snapshot: Snapshot) -> None:
        snapshot.entry = snapshot.node.snapshot = None
        self.num_snapshots -= 1
        self._free.append(snapshot.slot)

    def forget(self, node: Node) -> None:
        """The block of ``node`` is evicted, and with it its snapshot."""
        if node.snapshot is not None:
            self._evict(node.snapshot)

    def check(self, holders: Several[Sequence]) -> None:
        """Assert that every slot is accounted for, given all sequences that hold blocks. Costs O(tree)."""
        slots = list(self._free)
        for seq in holders:
            assert seq.state is not None, "a sequence holds blocks, and no state"
            slots += [slot for slot in (seq.state.slot, seq.state.spare) if slot >= 0]
            slots += [slot for _, slot in seq.state.pending]
            assert seq.state.pending == sorted(seq.state.pending), "a snapshot is behind a later one"
        snapshots = [node.snapshot for node in self.tree.walk() if node.snapshot is not None]
        slots += [snapshot.slot for snapshot in snapshots]
        assert sorted(slots) == list(range(self.size.num_slots)), "a slot is lost, or used twice"
        assert len(snapshots) == self.num_snapshots, "snapshots are miscounted"
        assert sum(len(seq.state.pending) for seq in holders if seq.state) == self.num_pending, "pending is miscounted"
        assert self.tree.root.snapshot is None, "a snapshot of nothing"
        for snapshot in snapshots:
            assert snapshot.node.snapshot is snapshot, "a snapshot is attached to another node"
            assert snapshot.node.block >= 0, "a snapshot has no keys and values"
            assert snapshot.node.depth * self.block_size % self.interval == 0, "a snapshot between two intervals"
        placed = {id(entry[2]) for entry in self._heap if entry[2].entry is entry}
        assert placed == {id(snapshot) for snapshot in snapshots}, "a snapshot has no place in the heap"
