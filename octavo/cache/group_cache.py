"""One KV group of the cache: a block pool, the prefix cache's tree, and the sliding window.

A block is in exactly one of three states::

               reserve                        publish: full and committed blocks are added to the tree
       FREE ───────────> HELD by sequences ──────────────────────────────────────────────┐
        ^                  │         ^                                                   │
        │   release        │         │ adopt                                             v
        ├──────────────────┘         └──────────────── IDLE: in the tree, held by no sequence
        └────────────────────────────────────────────── evict, when a reservation needs it

    num_free + num_used + num_cached == num_blocks

With a sliding window, a sequence frees its blocks behind the window (``slide``), and a prefix matches by the blocks of
its last window alone. The blocks that a sequence holds here are in its ``groups[index]``.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Several
from typing import NamedTuple

from octavo.cache.kv_events import KVEvents
from octavo.cache.node import Node, User
from octavo.cache.radix_tree import RadixTree
from octavo.cache.sessions import live
from octavo.types import GroupBlocks, Sequence


class GroupSize(NamedTuple):
    """Size of a KV group of the cache."""

    num_blocks: int
    window: int = 0
    """Sliding window in tokens, the row's own included; 0: full attention."""


class GroupCache:
    """Allocates blocks of one KV group to sequences; see ``KVCache``, which combines all groups."""

    def __init__(
        self,
        index: int,
        size: GroupSize,
        block_size: int,
        enable_prefix_caching: bool = True,
        *,
        eviction: str = "lru",
        watermark: float = 0.0,
        events: KVEvents | None = None,
        clock: Callable[[], float] = time.monotonic,
        rank: int = 0,
    ) -> None:
        """The blocks of a ``rank`` are numbered behind those of the ranks before it."""
        self.index = index
        self.rank = rank
        self.window = size.window
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.num_spared = int(watermark * size.num_blocks)
        self.clock = clock
        self.pool = BlockPool(size.num_blocks, rank * size.num_blocks)
        self.tree = RadixTree(block_size, eviction, size.num_blocks, clock, events, has_window=size.window > 0)
        self.num_evicted = 0
        """Blocks evicted from the prefix cache."""
        self.num_slots = 0
        """Slots in all block tables, including entries behind the window; a shared block counts in each table."""
        root = self.tree.root
        self._last_border = (root, root, root)
        """Cache of ``_num_idle``: the last node asked for, the deepest held node on its path, and the first idle one.
        A waiting sequence for which there are no blocks asks again in every step."""

    @property
    def num_blocks(self) -> int:
        return self.pool.num_blocks

    @property
    def num_free(self) -> int:
        return self.pool.num_free

    @property
    def num_cached(self) -> int:
        """Idle blocks, kept for reuse."""
        return len(self.tree.idle)

    @property
    def num_pinned(self) -> int:
        """Blocks, idle or held, that are evicted only after all others."""
        self.tree.pinned.expire()
        return len(self.tree.pinned)

    @property
    def num_used(self) -> int:
        """Blocks held by sequences."""
        return self.num_blocks - self.num_free - self.num_cached

    def blocks_for(self, num_tokens: int) -> int:
        """Number of blocks that hold ``num_tokens`` positions."""
        return -(-num_tokens // self.block_size)

    def blocks_behind(self, num_tokens: int) -> int:
        """Number of blocks to which neither position ``num_tokens`` nor a later one attends."""
        return max(0, num_tokens + 1 - self.window) // self.block_size if self.window else 0

    def most_held(self, num_tokens: int, max_step_tokens: int) -> int:
        """The most blocks that a sequence of ``num_tokens`` positions needs at once."""
        span = self.window + max_step_tokens if self.window else num_tokens  # unaligned, hence one more below
        return min(self.blocks_for(num_tokens), self.blocks_for(span) + 1)

    # ---- prefixes

    def match(self, seq: Sequence, num_blocks: int) -> Node:
        """The last node of the longest cached prefix of ``seq``, at most ``num_blocks`` deep.

        With a sliding window, only the last window of the prefix has to be cached. The search resumes from the last
        result for ``seq``, so that repeated calls while it waits cost only what changed.
        """
        held, salt = seq.groups[self.index], seq.salt
        if self.window:
            ends = self._usable_ends(seq, held)
            return ends[bisect_right(ends, num_blocks, key=lambda end: end.depth) - 1]
        node = held.matched[self.rank] = self.tree.find(seq.keys, num_blocks, salt, held.matched.get(self.rank))
        while node.depth > num_blocks and node.parent is not None:
            node = node.parent
        return node

    def _usable_ends(self, seq: Sequence, held: GroupBlocks) -> list[Node]:
        """The last nodes of all prefixes of ``seq`` whose last window is cached, the root first."""
        version = (self.tree.num_born, len(self.tree.node_of), len(seq.tokens))
        if (matched := held.matched.get(self.rank)) is None or matched[0] != version:
            ends = self.tree.find_recent(
                seq.keys,
                (len(seq.tokens) - 1) // self.block_size,
                seq.salt,
                lambda depth: self.blocks_behind(depth * self.block_size),
            )
            matched = held.matched[self.rank] = (version, ends)
        usable: list[Node] = matched[1]
        return usable

    def fits(self, end: Node, num_tokens: int, num_spare: int = 0) -> bool:
        """Whether there are blocks for ``num_tokens`` positions, of which those up to ``end`` are cached, with
        ``num_spare`` left, or the watermark if that is more; with ``num_spare`` 0 the watermark does not apply."""
        num_idle = self._num_idle(end)  # counted in num_cached, but not evictable for this sequence
        num_missing = self.blocks_for(num_tokens) - end.depth + num_idle
        num_spare = max(num_spare, self.num_spared) if num_spare else 0
        return num_missing + num_spare <= self.num_free + self.num_cached

    def _num_idle(self, node: Node) -> int:
        """Number of idle blocks on the path to ``node``, without those behind its window."""
        if self.window:
            num_behind = self.blocks_behind(node.depth * self.block_size)
            return sum(self.pool.refs[block] == 0 for block in node.path()[num_behind:])
        # All nodes above a held one are held, and all below an idle one are idle: the border between them suffices.
        asked, held, idle = self._last_border
        if asked is not node or not self._is_held(held) or (held is not node and self._is_held(idle)):
            held = idle = node
            while not self._is_held(held):
                idle, held = held, held.parent or self.tree.root
            self._last_border = (node, held, idle)
        return node.depth - held.depth

    def _is_held(self, node: Node) -> bool:
        return node.parent is None or self.pool.refs[node.block] > 0

    def find_part(self, seq: Sequence, end: Node) -> tuple[int, int]:
        """The child block of ``end`` that shares the most first tokens with what follows in ``seq``, and their number;
        at least one token is left to compute.

        To be called before blocks are reserved, since that may evict the block.
        """
        limit = min(len(seq.tokens) - 1 - end.depth * self.block_size, self.block_size - 1)
        return self.tree.nearest(end, seq.keys, limit, seq.salt) if limit > 0 else (-1, 0)

    # ---- blocks of a sequence

    def adopt(self, seq: Sequence, end: Node) -> None:
        """Give ``seq``, which holds no blocks, the blocks up to ``end`` that are not behind the window."""
        held = seq.groups[self.index]
        first = held.first_block = self.blocks_behind(end.depth * self.block_size)
        blocks = end.path()[first:]
        for block in blocks:
            self._hold(block)
        held.block_table = [0] * first + blocks
        self.tree.use(end, (seq.request.owner, seq.request.session))
        self.num_slots += end.depth * self.block_size
        self.tree.move_end(None, end)
        held.published = end
        held.matched.clear()

    def can_grow(self, seq: Sequence, num_tokens: int) -> bool:
        """Whether there are blocks, free or idle, for ``seq`` to cover ``num_tokens`` positions."""
        num_missing = -(-num_tokens // self.block_size) - len(seq.groups[self.index].block_table)
        return num_missing <= len(self.pool.free_blocks) + len(self.tree.idle)

    def grow(self, seq: Sequence, num_tokens: int) -> None:
        """Append blocks to the table of ``seq`` until it covers ``num_tokens`` positions; ``can_grow`` must hold."""
        table = seq.groups[self.index].block_table
        num_missing = -(-num_tokens // self.block_size) - len(table)
        if num_missing > 0:
            self.evict(num_missing - len(self.pool.free_blocks))
            table += [self.pool.take() for _ in range(num_missing)]
            self.num_slots += num_missing * self.block_size

    def publish(self, seq: Sequence, num_tokens: int) -> None:
        """Add the full blocks among the first ``num_tokens`` positions of ``seq`` to the tree.

        ``published`` is the last node of ``seq`` in the tree, so only blocks completed since then are visited.

        If another sequence published the same prefix first, ``seq`` switches to that block and releases its own, so
        that both hold one path. Otherwise a node could have a parent that its holder does not hold: the parent could
        become idle, but could not be evicted.
        """
        if not self.enable_prefix_caching:
            return
        held = seq.groups[self.index]
        node: Node = held.published or self.tree.root
        keys, user = seq.keys, (seq.request.owner, seq.request.session)
        for index in range(node.depth, num_tokens // self.block_size):
            edge = self.tree.edge(keys, index, seq.salt)
            own = held.block_table[index]
            child = node.children.get(edge)
            if child is None or child.block < 0:
                child = self.tree.insert(node, edge, own, user)
            elif child.block != own:
                if child.only_user != user:
                    child.only_user = None
                self._hold(child.block)
                self._drop(own)
                held.block_table[index] = child.block
                held.table_version += 1
            node = child
        self.tree.move_end(held.published, node)
        held.published = node

    def slide(self, seq: Sequence, num_tokens: int) -> None:
        """Free the blocks of ``seq`` that are behind the window, given ``num_tokens`` committed positions."""
        held = seq.groups[self.index]
        first, held.first_block = held.first_block, max(held.first_block, self.blocks_behind(num_tokens))
        for block in held.block_table[first : held.first_block]:
            self._drop(block, is_passed=True)

    def truncate(self, seq: Sequence, num_tokens: int) -> None:
        """Free the blocks that hold only positions from ``num_tokens`` on, none of which may be published."""
        held = seq.groups[self.index]
        assert held.published is None or num_tokens >= held.published.depth * self.block_size
        surplus = held.block_table[self.blocks_for(num_tokens) :]
        if surplus:
            del held.block_table[-len(surplus) :]
            held.table_version += 1
            self.num_slots -= len(surplus) * self.block_size
            for block in reversed(surplus):
                self._drop(block)

    def release(self, seq: Sequence) -> None:
        """Release all blocks of ``seq``; its published blocks stay in the prefix cache until evicted."""
        request, held = seq.request, seq.groups[self.index]
        if request.cache_ttl and held.published is not None:
            self.tree.pinned.pin(held.published, self.clock() + request.cache_ttl, request.owner)
        self.num_slots -= len(held.block_table) * self.block_size
        for block in reversed(held.block_table[held.first_block :]):  # deepest first: see RadixTree
            self._drop(block)
        self.tree.move_end(held.published, None)
        held.block_table = []
        held.first_block = 0
        held.table_version += 1
        held.published = None

    def forget(self, end: Node, user: User) -> None:
        """Evict what of the path to ``end`` only the session ``user`` used, and no sequence holds."""
        for block in self.tree.cut(live(end), user):
            self.pool.free(block)
            self.num_evicted += 1
        self.tree.on_evicted()

    def evict(self, num_blocks: int) -> None:
        """Evict ``num_blocks`` idle blocks, in the order of the eviction policy; none if negative."""
        for _ in range(num_blocks):
            self.pool.free(self.tree.evict())
            self.num_evicted += 1
        self.tree.on_evicted()

    def _hold(self, block: int) -> None:
        if self.pool.refs[block] == 0:
            self.tree.wake(block)
        self.pool.share(block)

    def _drop(self, block: int, is_passed: bool = False) -> None:
        if self.pool.drop(block) and not self.tree.rest(block, is_passed):
            self.pool.free(block)

    def check(self, holders: Several[Sequence]) -> None:
        """Assert that every block is accounted for, given all sequences that hold blocks. Costs O(pool)."""
        refs, free = self.pool.refs, self.pool.free_blocks
        held: Counter[int] = Counter()
        for seq in holders:
            of_seq = seq.groups[self.index]
            held.update(of_seq.block_table[of_seq.first_block :])
            self._check_published(seq, of_seq)
        num_slots = sum(len(seq.groups[self.index].block_table) for seq in holders) * self.block_size
        assert self.num_slots == num_slots, "positions are miscounted"
        assert [held.get(block, 0) for block in range(len(refs))] == refs, "reference counts drifted"
        assert len(set(free)) == len(free), "a block was freed twice"
        self.tree.check(refs, Counter(seq.groups[self.index].published for seq in holders))
        unused = {block for block in self.pool.blocks if not refs[block]} - self.tree.node_of.keys()
        assert unused == set(free), f"blocks lost, or free and in use: {unused ^ set(free)}"

    def _check_published(self, seq: Sequence, held: GroupBlocks) -> None:
        node: Node | None = held.published
        depth = node.depth if node else 0
        assert depth * self.block_size <= seq.num_computed_tokens, "published before it was computed"
        while node is not None and node.depth > held.first_block:
            assert held.block_table[node.depth - 1] == node.block, "the table of a sequence left its published path"
            node = node.parent


class BlockPool:
    """``num_blocks`` interchangeable blocks with a reference count each, numbered from ``first`` on; every operation is
    O(1).

    The reference count is the number of block tables that hold the block. A block without references is either on the
    free list or kept by the prefix cache for reuse; the caller decides which, by calling ``free`` or not.
    """

    def __init__(self, num_blocks: int, first: int = 0) -> None:
        self.num_blocks = num_blocks
        self.blocks = range(first, first + num_blocks)
        self.refs = [0] * self.blocks.stop
        """By number; those before the first have none."""
        self.free_blocks = list(reversed(self.blocks))

    @property
    def num_free(self) -> int:
        return len(self.free_blocks)

    def take(self) -> int:
        """Allocate a free block, with one reference; the free list must not be empty."""
        block = self.free_blocks.pop()
        self.refs[block] = 1
        return block

    def share(self, block: int) -> None:
        """Add a reference to ``block``."""
        self.refs[block] += 1

    def drop(self, block: int) -> bool:
        """Drop a reference to ``block``; returns whether it was the last one."""
        self.refs[block] -= 1
        return self.refs[block] == 0

    def free(self, block: int) -> None:
        """Put ``block``, which has no references, on the free list; its content is lost."""
        self.free_blocks.append(block)
