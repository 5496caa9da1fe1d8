"""One KV group of the cache: a pool of blocks, the index of those that can be found again, and a sliding window.

A block is in exactly one of three states::

               reserve                        publish: full and committed blocks are put in the tree
       FREE ───────────> HELD by sequences ──────────────────────────────────────────────┐
        ^                  │         ^                                                   │
        │   release        │         │ adopt                                             v
        ├──────────────────┘         └──────────────── IDLE: in the tree, held by nobody
        └────────────────────────────────────────────── evict, when a reservation needs it

    num_free + num_used + num_cached == num_blocks

Where the group has a window, a sequence gives back what is behind it (``slide``), and a prefix is found by its last
blocks alone. What a sequence holds here is its ``groups[index]``.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections import Counter, OrderedDict
from collections.abc import Callable
from collections.abc import Sequence as Several
from typing import NamedTuple

from octavo.cache.block_pool import BlockPool
from octavo.cache.kv_events import KVEvents
from octavo.cache.node import Node
from octavo.cache.radix_tree import RadixTree
from octavo.types import GroupBlocks, Sequence


class GroupSize(NamedTuple):
    """What a KV group of the cache is made of."""

    num_blocks: int
    window: int = 0
    """Positions up to its own that a row attends to; 0: all."""


class GroupCache:
    """Hands blocks of one KV group to sequences; see ``KVCache``, which asks all groups at once."""

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
    ) -> None:
        self.index = index
        self.window = size.window
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.num_spared = int(watermark * size.num_blocks)
        self.clock = clock
        self.pool = BlockPool(size.num_blocks)
        self.tree = RadixTree(block_size, eviction, size.num_blocks, clock, events, has_window=size.window > 0)
        self.num_evicted = 0
        """Idle blocks that were given up to make room."""
        self.num_slots = 0
        """Token positions in all block tables, those given back included; a shared block counts in each."""
        root = self.tree.root
        self._last_border = (root, root, root)
        """The node whose path was looked at last, the deepest held block on it, and the first idle one: who is first
        in line, and has no room, asks again in every step."""
        self._asks_for_turns = eviction == "session"
        self._last_turns: OrderedDict[tuple[str, str], Node] = OrderedDict()
        """The end of the latest turn of each session, by salt and session; as many as there are blocks."""

    @property
    def num_blocks(self) -> int:
        return self.pool.num_blocks

    @property
    def num_free(self) -> int:
        return self.pool.num_free

    @property
    def num_cached(self) -> int:
        """Idle blocks, kept only for reuse."""
        return len(self.tree.idle)

    @property
    def num_used(self) -> int:
        """Blocks that some sequence holds."""
        return self.num_blocks - self.num_free - self.num_cached

    def blocks_for(self, num_tokens: int) -> int:
        """How many blocks hold ``num_tokens`` positions."""
        return -(-num_tokens // self.block_size)

    def blocks_behind(self, num_tokens: int) -> int:
        """How many blocks neither position ``num_tokens`` nor a later one looks back to."""
        return max(0, num_tokens + 1 - self.window) // self.block_size if self.window else 0

    def most_held(self, num_tokens: int, max_step_tokens: int) -> int:
        """The most blocks that a sequence of ``num_tokens`` positions must hold at once."""
        span = self.window + max_step_tokens if self.window else num_tokens  # not at a block's edge: one more
        return min(self.blocks_for(num_tokens), self.blocks_for(span) + 1)

    # ---- prefixes

    def match(self, seq: Sequence, num_blocks: int) -> Node:
        """The end of the longest cached prefix of ``seq``, at most ``num_blocks`` deep.

        With a window, only the last window of it has to be cached. The search goes on from where the last one for
        ``seq`` ended, so that asking again while it waits costs only what changed.
        """
        held, salt = seq.groups[self.index], seq.request.cache_salt
        if self.window:
            ends = self._usable_ends(seq, held)
            return ends[bisect_right(ends, num_blocks, key=lambda end: end.depth) - 1]
        node = held.matched = self.tree.find(seq.tokens, num_blocks, salt, held.matched)
        while node.depth > num_blocks and node.parent is not None:
            node = node.parent
        return node

    def _usable_ends(self, seq: Sequence, held: GroupBlocks) -> list[Node]:
        """The ends of all prefixes of ``seq`` whose last window is cached, the root first."""
        version = (self.tree.num_born, len(self.tree.node_of), len(seq.tokens))
        if held.matched is None or held.matched[0] != version:
            ends = self.tree.find_recent(
                seq.tokens,
                (len(seq.tokens) - 1) // self.block_size,
                seq.request.cache_salt,
                lambda depth: self.blocks_behind(depth * self.block_size),
            )
            held.matched = (version, ends)
        usable: list[Node] = held.matched[1]
        return usable

    def fits(self, end: Node, num_tokens: int, num_spare: int = 0) -> bool:
        """Whether there are blocks for ``num_tokens`` positions of which those up to ``end`` are cached, and
        ``num_spare`` for others, if there are any: not less than the watermark then."""
        num_idle = self._num_idle(end)  # counted as to be had, but needed here
        num_missing = self.blocks_for(num_tokens) - end.depth + num_idle
        num_spare = max(num_spare, self.num_spared) if num_spare else 0
        return num_missing + num_spare <= self.num_free + self.num_cached

    def _num_idle(self, node: Node) -> int:
        """How many blocks on the path to ``node``, of those that it looks back to, nobody holds."""
        if self.window:
            num_behind = self.blocks_behind(node.depth * self.block_size)
            return sum(self.pool.refs[block] == 0 for block in node.path()[num_behind:])
        # All above a held block are held, and all below an idle one idle, so the place between them says it all.
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
        """The block below ``end`` that begins with most of what follows in ``seq``, and with how many positions; a
        token is left to compute.

        To be asked before blocks are reserved: what is evicted for them may be that block.
        """
        limit = min(len(seq.tokens) - 1 - end.depth * self.block_size, self.block_size - 1)
        return self.tree.nearest(end, seq.tokens, limit, seq.request.cache_salt) if limit > 0 else (-1, 0)

    # ---- what a sequence holds

    def adopt(self, seq: Sequence, end: Node) -> None:
        """Give ``seq``, which holds nothing, the blocks up to ``end`` that are not behind the window."""
        held = seq.groups[self.index]
        first = held.first_block = self.blocks_behind(end.depth * self.block_size)
        blocks = end.path()[first:]
        for block in blocks:
            self._hold(block)
        held.block_table = [0] * first + blocks
        self.tree.use(end)
        self.num_slots += end.depth * self.block_size
        self.tree.move_end(None, end)
        held.published = end
        held.matched = None

    def can_grow(self, seq: Sequence, num_tokens: int) -> bool:
        """Whether there are blocks, free or idle, for ``seq`` to cover ``num_tokens`` positions."""
        num_missing = -(-num_tokens // self.block_size) - len(seq.groups[self.index].block_table)
        return num_missing <= len(self.pool.free_blocks) + len(self.tree.idle)

    def grow(self, seq: Sequence, num_tokens: int) -> None:
        """Add blocks to the table of ``seq`` until it covers ``num_tokens`` positions; ``can_grow`` says it can."""
        table = seq.groups[self.index].block_table
        num_missing = -(-num_tokens // self.block_size) - len(table)
        if num_missing > 0:
            self.evict(num_missing - len(self.pool.free_blocks))
            table += [self.pool.take() for _ in range(num_missing)]
            self.num_slots += num_missing * self.block_size

    def publish(self, seq: Sequence, num_tokens: int) -> None:
        """Let others find the full blocks among the first ``num_tokens`` positions of ``seq``.

        ``published`` is the last node of ``seq`` in the tree, so only blocks completed since then are looked at.

        When another sequence published the same prefix first, ``seq`` changes over to that block and gives its
        own back. Both then hold one path. With a copy each, a child would hang below a parent that its
        holder does not hold: the parent could go idle, and could not be evicted.
        """
        if not self.enable_prefix_caching:
            return
        held = seq.groups[self.index]
        node: Node = held.published or self.tree.root
        for index in range(node.depth, num_tokens // self.block_size):
            edge = self.tree.edge(seq.tokens, index, seq.request.cache_salt)
            own = held.block_table[index]
            child = node.children.get(edge)
            if child is None or child.block < 0:
                child = self.tree.insert(node, edge, own)
            elif child.block != own:
                self._hold(child.block)
                self._drop(own)
                held.block_table[index] = child.block
                held.table_version += 1
            node = child
        self.tree.move_end(held.published, node)
        held.published = node

    def slide(self, seq: Sequence, num_tokens: int) -> None:
        """Take back the blocks of ``seq`` that are behind the window, where ``num_tokens`` positions are committed."""
        held = seq.groups[self.index]
        first, held.first_block = held.first_block, max(held.first_block, self.blocks_behind(num_tokens))
        for block in held.block_table[first : held.first_block]:
            self._drop(block, is_passed=True)

    def truncate(self, seq: Sequence, num_tokens: int) -> None:
        """Take back the blocks of positions from ``num_tokens`` on only, none of which may be published."""
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
        """Take back all blocks of ``seq``; what it published stays findable until evicted."""
        request, held = seq.request, seq.groups[self.index]
        if held.published is not None:
            if request.cache_ttl:
                self.tree.keep(held.published, self.clock() + request.cache_ttl)
            if request.session and self._asks_for_turns:
                self._note_turn((request.cache_salt, request.session), held)
        self.num_slots -= len(held.block_table) * self.block_size
        for block in reversed(held.block_table[held.first_block :]):  # deepest first: see RadixTree
            self._drop(block)
        self.tree.move_end(held.published, None)
        held.block_table = []
        held.first_block = 0
        held.table_version += 1
        held.published = None

    def _note_turn(self, session: tuple[str, str], held: GroupBlocks) -> None:
        """A sequence ends the latest turn of its session; nobody comes again where it left the path of the turn
        before."""
        before = self._last_turns.pop(session, None)
        if before is not None:
            self.tree.supersede(before, held.block_table)
        self._last_turns[session] = held.published
        if len(self._last_turns) > self.num_blocks:
            self._last_turns.popitem(last=False)

    def evict(self, num_blocks: int) -> None:
        """Forget ``num_blocks`` idle blocks, in the order of the eviction policy; none when negative."""
        for _ in range(num_blocks):
            self.pool.free(self.tree.evict())
            self.num_evicted += 1

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
        assert [held.get(block, 0) for block in range(self.num_blocks)] == refs, "reference counts drifted"
        assert len(set(free)) == len(free), "a block was freed twice"
        self.tree.check(refs, Counter(seq.groups[self.index].published for seq in holders))
        unused = {block for block, num_held in enumerate(refs) if not num_held} - self.tree.node_of.keys()
        assert unused == set(free), f"blocks lost, or free and in use: {unused ^ set(free)}"

    def _check_published(self, seq: Sequence, held: GroupBlocks) -> None:
        node: Node | None = held.published
        depth = node.depth if node else 0
        assert depth * self.block_size <= seq.num_computed_tokens, "published before it was computed"
        while node is not None and node.depth > held.first_block:
            assert held.block_table[node.depth - 1] == node.block, "the table of a sequence left its published path"
            node = node.parent
