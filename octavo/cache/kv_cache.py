"""The KV cache's bookkeeping: which block belongs to which sequence, and which blocks the prefix cache can reuse.

Layers that cache the same positions are a KV group, and share one block table per sequence. A ``GroupCache`` manages
the blocks of one group; ``KVCache`` combines all groups, so that a sequence gets blocks in every group or in none,
and a prefix matches as far as every group has the blocks it needs: full attention all of them, a sliding window those
of the last window::

    full attention    a a a a b b b c c c .     block tables of one sequence, one letter per step:
    sliding window    . . . . . . . c c c .     full attention holds all blocks, the window those of a window and a step

The tensors are in ``KVStorage``; here a block is a number. Verbs: ``match``, ``admits``, ``start``, ``adopt``,
``reserve``, ``publish``, ``slide``, ``truncate``, ``release``, ``check``. Each but ``check`` costs at most
O(tokens involved).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Several
from concurrent.futures import Future

from octavo.cache.group_cache import GroupCache, GroupSize
from octavo.cache.kv_events import KVEvents
from octavo.cache.node import Node
from octavo.cache.offload import Offload
from octavo.cache.offload_tiers import Content
from octavo.cache.sessions import MAX_BRANCHES, Sessions, live
from octavo.cache.state_cache import StateCache
from octavo.errors import ConfigError
from octavo.steps.limits import StateSize
from octavo.types import GroupBlocks, KVTransfer, Plan, Sequence

NO_STOP = 1 << 62
"""Room of a sequence without recurrent state."""
CopySlots = Callable[[int, int, int, int], None]
"""Copies the first slots of one block into another, before any step that is submitted later. Arguments: KV group,
source block, target block, number of slots."""


class KVCache:
    """Allocates blocks of ``block_size`` slots to sequences, and shares blocks of equal prefixes.

    ``groups`` are the KV groups, the one that reaches furthest back first; a number means one full-attention group
    with that many blocks. ``eviction`` is a policy of ``octavo.cache.eviction``. ``watermark`` is the share of the
    blocks that admission keeps free for running sequences to grow into. ``events`` record the first group's blocks.
    ``states`` is the size of the pool of recurrent states, for models that have any; there is one group then.

    With data-parallel attention each of ``num_ranks`` ranks has so many blocks, and a prefix cache, of its own. A
    sequence has blocks of one of them, its ``dp_rank``, which may change while it has none.
    """

    def __init__(
        self,
        groups: int | Several[GroupSize],
        block_size: int,
        enable_prefix_caching: bool = True,
        *,
        eviction: str = "lru",
        watermark: float = 0.0,
        events: KVEvents | None = None,
        clock: Callable[[], float] = time.monotonic,
        states: StateSize | None = None,
        num_ranks: int = 1,
    ) -> None:
        self.block_size = block_size
        self.events = events
        self.ranks = [
            [
                GroupCache(
                    index,
                    size,
                    block_size,
                    enable_prefix_caching,
                    eviction=eviction,
                    watermark=watermark,
                    events=None if index else events,
                    clock=clock,
                    rank=rank,
                )
                for index, size in enumerate([GroupSize(groups)] if isinstance(groups, int) else groups)
            ]
            for rank in range(num_ranks)
        ]
        self.groups = self.ranks[0]
        """Those of the first rank, which is the only one but with data-parallel attention."""
        self.states: StateCache | None = None
        """The recurrent states, for models that have any."""
        if states is not None:
            assert len(self.groups) == num_ranks == 1, "a model with recurrent state has one KV group"
            self.states = StateCache(states, self.groups[0].tree, enable_prefix_caching)
        self.has_windows = any(group.window for group in self.groups)
        """Whether there are sliding-window groups, which free blocks behind their window."""
        self.sessions = Sessions(self.num_blocks, block_size, clock)
        self._supersedes = eviction == "session"
        self.offload: Offload | None = None
        """Slower tiers that keep the contents of evicted blocks."""
        self.copy_slots: CopySlots | None = None
        """If set, the matching first slots of a cached block are copied where the block matches only in part."""
        self.num_copied = 0
        """Positions that were copied instead of computed."""
        self.num_filled = 0
        """Positions computed or in flight, of all sequences that hold blocks."""

    @property
    def num_blocks(self) -> int:
        """Blocks of the first group, of all ranks."""
        return sum(groups[0].num_blocks for groups in self.ranks)

    @property
    def num_empty_slots(self) -> int:
        """Empty slots of the first group's held blocks. Shared blocks have none, so none is counted twice."""
        return sum(groups[0].num_slots for groups in self.ranks) - self.num_filled

    def of(self, seq: Sequence) -> list[GroupCache]:
        """The groups of the rank that ``seq`` belongs to."""
        return self.ranks[seq.dp_rank]

    def roots(self, seq: Sequence) -> list[Node]:
        """In each group, the node of the empty prefix."""
        return [group.tree.root for group in self.of(seq)]

    def no_blocks(self) -> list[GroupBlocks]:
        """``Sequence.groups`` of a new sequence."""
        return [GroupBlocks() for _ in self.groups]

    def could_hold(self, num_tokens: int, max_step_tokens: int) -> bool:
        """Whether an empty cache has enough blocks for a sequence of ``num_tokens`` positions."""
        return all(group.most_held(num_tokens, max_step_tokens) <= group.num_blocks for group in self.groups)

    # ---- admission

    def match(self, seq: Sequence, rank: int | None = None) -> list[Node]:
        """In each group of a rank, by default its own, the last node of the longest prefix of ``seq`` that all have
        cached.

        At least one token is left to compute, since sampling needs the logits of the last token.
        """
        least = (len(seq.tokens) - 1) // self.block_size
        groups = self.ranks[seq.dp_rank if rank is None else rank]
        while True:
            ends = [group.match(seq, least) for group in groups]
            depths = [end.depth for end in ends]
            least = min(depths)
            if least == max(depths):
                return ends if self.states is None else [self.states.match(ends[0])]

    def admits(self, seq: Sequence, ends: list[Node], max_step_tokens: int, num_spare: int = 0) -> bool:
        """Whether ``seq``, cached up to ``ends``, can be started with ``num_spare`` blocks left in each group, or the
        watermark if that is more; with ``num_spare`` 0, no other sequence runs and the watermark does not apply.

        Blocks are needed for all its tokens; in sliding-window groups for one step, since blocks behind the window are
        freed.
        """
        needs = self._first_needs(seq, ends, max_step_tokens)
        parts = zip(self.of(seq), ends, needs, strict=True)
        return all(group.fits(end, need, num_spare) for group, end, need in parts)

    def _first_needs(self, seq: Sequence, ends: list[Node], max_step_tokens: int) -> list[int]:
        """In each group, the positions that need blocks when ``seq`` is started."""
        num_tokens = len(seq.tokens)
        of_step = min(num_tokens, ends[0].depth * self.block_size + max_step_tokens)
        return [of_step if group.window else num_tokens for group in self.groups]

    def adopt(self, seq: Sequence, ends: list[Node]) -> None:
        """Give ``seq``, which holds no blocks, the cached blocks up to ``ends``, from ``match``."""
        for group, end in zip(self.of(seq), ends, strict=True):
            group.adopt(seq, end)
        seq.num_computed_tokens = seq.capacity = ends[0].depth * self.block_size
        self.num_filled += seq.num_computed_tokens

    def start(self, seq: Sequence, ends: list[Node], may_share: bool, max_step_tokens: int) -> None:
        """Give ``seq``, which holds no blocks, the cached blocks up to ``ends``, from ``match``, and new ones for the
        rest, which ``admits`` must have confirmed. With ``may_share``, offloaded or partially matching
        blocks are reused, too."""
        needs = self._first_needs(seq, ends, max_step_tokens)
        recalled = None
        if self.states is not None:
            branch = self.groups[0].match(seq, (len(seq.tokens) - 1) // self.block_size) if may_share else ends[0]
            if may_share and self.offload is not None:
                recalled = self.offload.recall_state(seq, branch.depth, ends[0].depth)
                ends = ends if recalled is None else [branch.above(recalled.num_blocks)]
            self.states.start(seq, ends[0], branch.depth * self.block_size)
        self.adopt(seq, ends)
        contents = self.recall(seq) if may_share and self.states is None else []
        if recalled is not None:
            contents = recalled.contents
        sources, num_copied = self._find_parts(seq, ends) if may_share and not contents else ([], 0)
        for group, need in zip(self.of(seq), needs, strict=True):
            group.grow(seq, need)
        seq.capacity = self._capacity(seq)
        self.restore(seq, contents)
        if recalled is not None and self.states is not None:
            self.states.restore(seq, recalled.state)
        if num_copied and self.copy_slots is not None:
            # A source that was evicted by ``grow`` above still has its content.
            for group, source in zip(self.groups, sources, strict=True):
                target = seq.groups[group.index].block_table[ends[0].depth]
                self.copy_slots(group.index, source, target, num_copied)
            seq.num_computed_tokens += num_copied
            self.num_filled += num_copied
            self.num_copied += num_copied

    def _find_parts(self, seq: Sequence, ends: list[Node]) -> tuple[list[int], int]:
        """In each group, the block with the most slots that ``seq`` can copy, and the number to copy in all groups."""
        if self.copy_slots is None or self.states is not None:
            return [], 0
        parts = [group.find_part(seq, end) for group, end in zip(self.of(seq), ends, strict=True)]
        return [source for source, _ in parts], min(count for _, count in parts)

    def _capacity(self, seq: Sequence) -> int:
        return min([len(held.block_table) for held in seq.groups]) * self.block_size

    # ---- slower tiers

    def use_offload(self, offload: Offload) -> None:
        """Keep the contents of evicted blocks and snapshots in ``offload``. Raises ``ConfigError`` if there is more
        than one group of keys and values to keep."""
        if len(self.groups) > 1:
            raise ConfigError("kv_offload_memory: the model caches different positions in different layers")
        self.offload = offload
        tree = self.groups[0].tree
        tree.on_insert, tree.on_evict, tree.on_evicted = offload.note, self._save, offload.reads.send
        if self.states is not None:
            self.states.offload = offload
            offload.blocks_per_state = self.states.interval // self.block_size

    def _save(self, node: Node) -> None:
        assert self.offload is not None
        self.offload.save(node)
        if self.states is not None:
            self.states.forget(node)

    def prefetch(
        self, seq: Sequence, compute_seconds: Callable[[int, int], float] | None = None
    ) -> Future[None] | None:
        """Start to read the blocks of a new ``seq`` that are only on disk or at a prefill server; ``None`` if there are
        none, or none to read. ``compute_seconds``: see ``Offload.prefetch``."""
        if self.offload is None:
            return None
        end = self.groups[0].tree.find(seq.keys, (len(seq.tokens) - 1) // self.block_size, seq.salt)
        num_with_state = 0 if self.states is None else self.states.match(end).depth
        return self.offload.prefetch(seq, end.depth, num_with_state, compute_seconds)

    def hold(self, seq: Sequence) -> KVTransfer | None:
        """Keep the prompt's blocks of ``seq``, which is about to be released, for a decode server, if its request asks
        for it and this is a prefill server; returns where."""
        transfer, published = seq.request.transfer, seq.groups[0].published
        if self.offload is None or published is None or transfer is None or transfer.address:
            return None
        end = published.above((seq.num_prompt_tokens - 1) // self.block_size)
        return self.offload.hold(end if self.states is None else self.states.match(end))

    def recall(self, seq: Sequence) -> list[Content]:
        """Contents in host memory of the blocks that follow those that ``seq`` has just adopted.

        To be called before blocks are reserved: blocks evicted for them may displace these contents.
        """
        return [] if self.offload is None else self.offload.recall(seq, len(seq.groups[0].block_table))

    def restore(self, seq: Sequence, contents: list[Content]) -> None:
        """Fill the first blocks that ``seq`` has reserved with ``contents``, from ``recall``, except the last block."""
        first, table = seq.num_computed_tokens // self.block_size, seq.groups[0].block_table
        contents = contents[: len(table) - first - 1]
        if self.offload is None or not contents:
            return
        self.offload.restore(table[first : first + len(contents)], contents)
        num_tokens = len(contents) * self.block_size
        seq.num_computed_tokens += num_tokens
        self.num_filled += num_tokens
        self.publish(seq, seq.num_computed_tokens)
        self.slide(seq, seq.num_computed_tokens)

    # ---- running and finished sequences

    def note_filled(self, num_tokens: int) -> None:
        """Add ``num_tokens``, which may be negative, to the count of positions computed or in flight."""
        self.num_filled += num_tokens

    def reserve(self, seq: Sequence, num_tokens: int) -> bool:
        """Grow the block tables of ``seq`` to ``num_tokens`` positions, or change nothing and return ``False``."""
        if num_tokens <= seq.capacity:
            return True
        groups = self.of(seq)
        for group in groups:
            if not group.can_grow(seq, num_tokens):
                return False
        for group in groups:
            group.grow(seq, num_tokens)
        seq.capacity = -(-num_tokens // self.block_size) * self.block_size
        return True

    def publish(self, seq: Sequence, num_tokens: int) -> None:
        """Add the full blocks among the first ``num_tokens`` positions of ``seq`` to the prefix cache.

        Only committed positions may be published: a step in flight can still fail, and its keys and values
        would never have been written.
        """
        for group in self.of(seq):
            group.publish(seq, num_tokens)
        if self.states is not None and (published := seq.groups[0].published) is not None:
            self.states.publish(seq, num_tokens, published)

    def slide(self, seq: Sequence, num_tokens: int) -> None:
        """Free the blocks of ``seq`` that are behind sliding windows, given ``num_tokens`` committed positions.

        Steps in flight compute later positions, so they neither read nor write these blocks.
        """
        for group in self.of(seq):
            if group.window:
                group.slide(seq, num_tokens)

    def truncate(self, seq: Sequence, num_tokens: int) -> None:
        """Discard the computed positions from ``num_tokens`` on, and free the blocks that hold only such positions.

        None of them may be published, and no step in flight may write to them.
        """
        for group in self.of(seq):
            group.truncate(seq, num_tokens)
        self.num_filled -= seq.num_computed_tokens - num_tokens
        seq.num_computed_tokens = num_tokens
        seq.capacity = self._capacity(seq)

    def room(self, seq: Sequence) -> int:
        """Most positions of ``seq`` that the next step may compute, as a snapshot of its state is due behind them."""
        return NO_STOP if self.states is None or not self.states.most_pending else self.states.room(seq)

    def note_submitted(self, plan: Plan) -> None:
        """Take snapshots of recurrent states behind ``plan``, which has just been submitted, where they are due."""
        if self.states is not None:
            for item in plan:
                self.states.note_submitted(item.seq, item.start + len(item.tokens) + len(item.drafts))

    def roll_back(self, seq: Sequence, start: int) -> None:
        """Undo a step of ``seq`` that began at position ``start`` and verified drafts, of which some were rejected: its
        state cannot be cut back, so what was accepted is computed again from the state before."""
        assert self.states is not None
        self.states.roll_back(seq)
        self.note_filled(start - seq.num_computed_tokens)
        seq.num_computed_tokens = start

    def release(self, seq: Sequence) -> None:
        """Release all blocks of ``seq``; its published blocks stay in the prefix cache until evicted."""
        if seq.request.session and seq.groups[0].published is not None:
            self._note_turn(seq)
        for group in self.of(seq):
            group.release(seq)
        if self.states is not None:
            self.states.release(seq)
        self.num_filled -= seq.num_computed_tokens
        seq.num_computed_tokens = seq.capacity = 0

    def _note_turn(self, seq: Sequence) -> None:
        """Record the end of a session's turn; with policy ``session``, blocks of the turn before that are not on its
        path are superseded."""
        turn, before = self.sessions.note_turn(seq)
        if self.offload is not None:
            self.offload.note_session(seq.request.owner, seq.request.session, turn.slot, turn.ends[0])
        if self._supersedes:
            for earlier in before:
                for group, end in zip(self.ranks[earlier.dp_rank], earlier.ends, strict=True):
                    group.tree.supersede(end, seq.groups[group.index].block_table)

    def forget_session(self, owner: str, name: str) -> None:
        """Evict what of the last turns of a session of ``owner`` no other request used."""
        for turn in [turn for session in self.sessions.forget(owner, name) for turn in session.turns]:
            for group, end in zip(self.ranks[turn.dp_rank], turn.ends, strict=True):
                group.forget(end, (owner, name))
        if self.offload is not None:
            for slot in range(MAX_BRANCHES):
                self.offload.note_session(owner, name, slot, self.groups[0].tree.root)

    def prefetch_session(self, owner: str, name: str) -> bool:
        """Start to read what is only on disk of the last turns of a session of ``owner``, for its next turns; return
        whether the hint was taken."""
        if self.offload is None:
            return False
        counts = [(0, 0)] * MAX_BRANCHES
        for turn in [turn for session in self.sessions.find(owner, name)[:1] for turn in session.turns]:
            end = live(turn.ends[0])
            counts[turn.slot] = end.depth, 0 if self.states is None else self.states.match(end).depth
        return self.offload.prefetch_session(owner, name, counts)

    def clear(self) -> None:
        """Evict every block that no sequence holds."""
        for group in [group for groups in self.ranks for group in groups]:
            group.evict(group.num_cached)

    def check(self, holders: Iterable[Sequence]) -> None:
        """Assert that every block is accounted for, given all sequences that hold blocks. Costs O(pool)."""
        holders = list(holders)
        for rank, groups in enumerate(self.ranks):
            for group in groups:
                group.check([seq for seq in holders if seq.dp_rank == rank])
        if self.states is not None:
            self.states.check(holders)
        assert self.num_filled == sum(seq.num_computed_tokens for seq in holders), "computed positions are miscounted"
        for seq in holders:
            assert len(seq.groups) == len(self.groups), "a sequence does not have one entry for each group"
            assert seq.capacity == self._capacity(seq), "a sequence's capacity is not that of its tables"
            depths = {held.published.depth if held.published else 0 for held in seq.groups}
            assert len(depths) == 1, "a sequence is published in one group, and not in another"
