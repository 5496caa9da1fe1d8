"""The KV cache as accounting: which block belongs to which sequence, and which can be found again.

A block is in exactly one of three states::

               reserve                        publish: full and committed blocks are put in the tree
       FREE ───────────> HELD by sequences ──────────────────────────────────────────────┐
        ^                  │         ^                                                   │
        │   release        │         │ adopt                                             v
        ├──────────────────┘         └──────────────── IDLE: in the tree, held by nobody
        └────────────────────────────────────────────── evict, when a reservation needs it

    num_free + num_used + num_cached == num_blocks

Where no layer of a model looks back further than a window, a sequence gives back what is behind it (``slide``), and a
prefix is found by its last blocks alone. Where some layers do and others do not, see ``HybridCache``.

The tensors live elsewhere (``KVStorage``); here a block is a number. Verbs: ``match``, ``fits``, ``start``, ``adopt``,
``reserve``, ``publish``, ``slide``, ``truncate``, ``release``, ``evict``, ``check``. None of them costs more than the
tokens it is about.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import Future

from octavo.cache.block_pool import BlockPool
from octavo.cache.kv_events import KVEvents
from octavo.cache.node import Node
from octavo.cache.offload import Offload
from octavo.cache.radix_tree import RadixTree
from octavo.types import Request, Sequence


class KVCache:
    """Hands blocks of ``block_size`` token positions to sequences, and shares those with equal prefixes.

    ``eviction`` is a policy of ``octavo.cache.eviction``. ``watermark`` is the share of the blocks that admission
    leaves alone, for those who run to grow into. ``window`` is the number of positions up to its own that a row sees in
    any layer, 0 for all.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        enable_prefix_caching: bool = True,
        *,
        eviction: str = "lru",
        watermark: float = 0.0,
        window: int = 0,
        events: KVEvents | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.num_reserved = int(watermark * num_blocks)
        self.window = window
        self.clock = clock
        self.pool = BlockPool(num_blocks)
        self.tree = RadixTree(block_size, eviction, num_blocks, clock, events, has_window=window > 0)
        self.offload: Offload | None = None
        """Where the contents of evicted blocks go, and come back from."""
        self.copy_slots: Callable[[int, int, int], None] | None = None
        """Copies the first positions of one block into another, given both and their number, before any step that is
        submitted from now on. With it, a block is reused in part where the next tokens begin like it."""
        self.num_copied = 0
        """Positions that were copied in place of being computed."""
        self.num_evicted = 0
        """Idle blocks that were given up to make room."""
        self.num_slots = 0
        """Token positions in all block tables, but for those given back; a shared block counts in each."""
        self.num_filled = 0
        """Of those, computed or in flight."""
        root = self.tree.root
        self._last_border = (root, root, root)
        """The node whose path was looked at last, the deepest held block on it, and the first idle one: who is first
        in line, and has no room, asks again in every step."""
        self._asks_for_turns = eviction == "session"
        self._last_turns: OrderedDict[tuple[str, str], Node] = OrderedDict()
        """The end of the latest turn of each session, by salt and session; as many as there are blocks."""

    @property
    def whole(self) -> KVCache:
        """Where only some layers have windows, the cache of the others; else this one."""
        return self

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

    @property
    def num_empty_slots(self) -> int:
        """Token positions of held blocks in which nothing is. Shared blocks are full, so each is counted once."""
        return self.num_slots - self.num_filled

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

    def could_hold(self, num_tokens: int, max_step_tokens: int) -> bool:
        """Whether all blocks together are enough for a sequence of ``num_tokens`` positions."""
        return self.most_held(num_tokens, max_step_tokens) <= self.num_blocks

    def match(self, seq: Sequence) -> Node:
        """The end of the longest cached prefix of ``seq``; never all of it.

        At least one token is left to compute, since sampling needs the logits after the last one. The search goes on
        from where the last one for ``seq`` ended, so that asking again while it waits costs only what changed.
        """
        num_blocks, salt = (len(seq.tokens) - 1) // self.block_size, seq.request.cache_salt
        if self.window:
            return self._match_recent(seq, num_blocks)
        node = seq.matched = self.tree.find(seq.tokens, num_blocks, salt, seq.matched)
        return node

    def _match_recent(self, seq: Sequence, num_blocks: int) -> Node:
        """The end of the longest prefix, at most so many blocks deep, of which the last window is cached."""
        version = (self.tree.num_born, len(self.tree.node_of), num_blocks)
        if seq.matched is None or seq.matched[0] != version:
            found = self.tree.find_recent(
                seq.tokens,
                num_blocks,
                seq.request.cache_salt,
                lambda depth: self.blocks_behind(depth * self.block_size),
            )
            seq.matched = (version, found)
        recent: Node = seq.matched[1]
        return recent

    def admits(self, seq: Sequence, node: Node, num_tokens: int, num_spare: int = 0) -> bool:
        """Whether ``seq``, cached up to ``node``, can be started with blocks for ``num_tokens``: see ``fits``."""
        return self.fits(node, num_tokens, num_spare)

    def fits(self, node: Node, num_tokens: int, num_spare: int = 0) -> bool:
        """Whether there are blocks for ``num_tokens`` positions of which those up to ``node`` are cached, and
        ``num_spare`` for others, if there are any: not less than the watermark then."""
        num_idle = self._num_idle(node)  # counted as to be had, but needed here
        num_missing = self.blocks_for(num_tokens) - node.depth + num_idle
        num_spare = max(num_spare, self.num_reserved) if num_spare else 0
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

    def adopt(self, seq: Sequence, node: Node) -> None:
        """Start ``seq``, which holds nothing, with the blocks up to ``node``, as ``match`` gave it."""
        seq.num_computed_tokens = node.depth * self.block_size
        first = seq.first_block = self.blocks_behind(seq.num_computed_tokens)
        held = node.path()[first:]
        for block in held:
            self._hold(block)
        seq.block_table = [0] * first + held
        self.tree.use(node)
        self.num_slots += len(held) * self.block_size
        self.num_filled += len(held) * self.block_size
        self.tree.move_end(None, node)
        seq.published = node
        seq.matched = None

    def start(self, seq: Sequence, node: Node, shares: bool, num_tokens: int | None = None) -> None:
        """Give ``seq``, which holds nothing, blocks for its first ``num_tokens`` tokens, or all: those up to ``node``,
        as ``match`` gave it, and others, which ``fits`` says are there. With ``shares``, more of them may have been
        computed elsewhere."""
        self.adopt(seq, node)
        recalled = self.recall(seq) if shares else []
        source, num_copied = self.find_part(seq, node) if shares and not recalled else (-1, 0)
        self.reserve(seq, num_tokens or len(seq.tokens))
        self.restore(seq, recalled)
        if num_copied and self.copy_slots is not None:
            # Should the source have been evicted just now, it still has its content.
            self.copy_slots(source, seq.block_table[node.depth], num_copied)
            self.note_copied(seq, num_copied)

    def note_copied(self, seq: Sequence, num_copied: int) -> None:
        """So many more positions of ``seq`` are computed, as copies of another block's."""
        seq.num_computed_tokens += num_copied
        self.note_filled(num_copied)
        self.num_copied += num_copied

    def note_filled(self, num_tokens: int) -> None:
        """So many more positions of held blocks are computed or in flight; fewer, when negative."""
        self.num_filled += num_tokens

    def find_part(self, seq: Sequence, node: Node) -> tuple[int, int]:
        """The block below ``node`` that ``seq`` can copy most positions of, and how many; a token is left to compute.

        To be asked before blocks are reserved: what is evicted for them may be that block.
        """
        limit = min(len(seq.tokens) - 1 - node.depth * self.block_size, self.block_size - 1)
        if self.copy_slots is None or limit <= 0:
            return -1, 0
        return self.tree.nearest(node, seq.tokens, limit, seq.request.cache_salt)

    def use_offload(self, offload: Offload) -> None:
        """Keep the contents of evicted blocks in ``offload``."""
        self.offload = offload
        self.tree.on_evict = offload.save

    def prefetch(self, request: Request) -> Future[None] | None:
        """Start to bring what slower tiers have of ``request`` near; ``None`` when there is nothing to wait for."""
        if self.offload is None:
            return None
        tokens: list[int | None] = [*request.prompt_tokens, *request.output_tokens]
        node = self.tree.find(tokens, (len(tokens) - 1) // self.block_size, request.cache_salt)
        return self.offload.prefetch(request, node.depth)

    def recall(self, seq: Sequence) -> list[bytes]:
        """What host memory has of the blocks that follow those that ``seq`` has just adopted.

        To be asked before blocks are reserved: what is evicted for them may push it out.
        """
        return [] if self.offload is None else self.offload.recall(seq, len(seq.block_table))

    def restore(self, seq: Sequence, contents: list[bytes]) -> None:
        """Fill the first blocks that ``seq`` has reserved with ``contents``, as ``recall`` gave them.

        The last one is left to compute into.
        """
        first = seq.num_computed_tokens // self.block_size
        contents = contents[: len(seq.block_table) - first - 1]
        if self.offload is None or not contents:
            return
        self.offload.restore(seq.block_table[first : first + len(contents)], contents)
        num_tokens = len(contents) * self.block_size
        seq.num_computed_tokens += num_tokens
        self.num_filled += num_tokens
        self.publish(seq, seq.num_computed_tokens)
        self.slide(seq, seq.num_computed_tokens)

    def reserve(self, seq: Sequence, num_tokens: int) -> bool:
        """Grow the block table of ``seq`` to cover ``num_tokens`` positions, or change nothing and say no."""
        num_missing = self.blocks_for(num_tokens) - len(seq.block_table)
        if num_missing <= 0:
            return True
        if num_missing > self.num_free + self.num_cached:
            return False
        self.evict(num_missing - self.num_free)
        for _ in range(num_missing):
            seq.block_table.append(self.pool.take())
        self.num_slots += num_missing * self.block_size
        return True

    def publish(self, seq: Sequence, num_tokens: int) -> None:
        """Let others find the full blocks among the first ``num_tokens`` positions of ``seq``.

        Only committed positions may be published: a step in flight can still fail, and its keys and values
        would never have been written. ``seq.published`` is the last node of ``seq`` in the tree, so only blocks
        completed since then are looked at.

        When another sequence published the same prefix first, ``seq`` changes over to that block and gives its
        own back. Both then hold one path. With a copy each, a child would hang below a parent that its
        holder does not hold: the parent could go idle, and could not be evicted.
        """
        if not self.enable_prefix_caching:
            return
        node: Node = seq.published or self.tree.root
        for index in range(node.depth, num_tokens // self.block_size):
            edge = self.tree.edge(seq.tokens, index, seq.request.cache_salt)
            own = seq.block_table[index]
            child = node.children.get(edge)
            if child is None or child.block < 0:
                child = self.tree.insert(node, edge, own)
            elif child.block != own:
                self._hold(child.block)
                self._drop(own)
                seq.block_table[index] = child.block
                seq.table_version += 1
            node = child
        self.tree.move_end(seq.published, node)
        seq.published = node

    def slide(self, seq: Sequence, num_tokens: int) -> None:
        """Take back the blocks of ``seq`` that are behind the window, where ``num_tokens`` positions are committed.

        Steps in flight look back from later positions, and never write to earlier ones.
        """
        first, seq.first_block = seq.first_block, max(seq.first_block, self.blocks_behind(num_tokens))
        for block in seq.block_table[first : seq.first_block]:
            self._drop(block, is_passed=True)
        self.num_slots -= (seq.first_block - first) * self.block_size
        self.num_filled -= (seq.first_block - first) * self.block_size

    def truncate(self, seq: Sequence, num_tokens: int) -> None:
        """Take back that positions from ``num_tokens`` on were computed, and the blocks of such positions only.

        None of them may be published, and no step in flight may write there.
        """
        assert seq.published is None or num_tokens >= seq.published.depth * self.block_size
        self.num_filled -= seq.num_computed_tokens - num_tokens
        seq.num_computed_tokens = num_tokens
        surplus = seq.block_table[self.blocks_for(num_tokens) :]
        if surplus:
            del seq.block_table[-len(surplus) :]
            seq.table_version += 1
            self.num_slots -= len(surplus) * self.block_size
            for block in reversed(surplus):
                self._drop(block)

    def release(self, seq: Sequence) -> None:
        """Take back all blocks of ``seq``; what it published stays findable until evicted."""
        request = seq.request
        if seq.published is not None:
            if request.cache_ttl:
                self.tree.keep(seq.published, self.clock() + request.cache_ttl)
            if request.session and self._asks_for_turns:
                self._note_turn((request.cache_salt, request.session), seq)
        self.num_slots -= (len(seq.block_table) - seq.first_block) * self.block_size
        self.num_filled -= seq.num_computed_tokens - seq.first_block * self.block_size
        for block in reversed(seq.block_table[seq.first_block :]):  # deepest first: see RadixTree
            self._drop(block)
        self.tree.move_end(seq.published, None)
        seq.block_table = []
        seq.first_block = 0
        seq.table_version += 1
        seq.num_computed_tokens = 0
        seq.published = None

    def _note_turn(self, session: tuple[str, str], seq: Sequence) -> None:
        """``seq`` is the latest turn of its session; nobody comes again where it left the path of the turn before."""
        before = self._last_turns.pop(session, None)
        if before is not None:
            self.tree.supersede(before, seq.block_table)
        self._last_turns[session] = seq.published
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

    def check(self, holders: Iterable[Sequence]) -> None:
        """Assert that every block is accounted for, given all sequences that hold blocks. Costs O(pool)."""
        refs, free = self.pool.refs, self.pool.free_blocks
        held: Counter[int] = Counter()
        ends: Counter[Node] = Counter()
        num_filled = 0
        for seq in holders:
            held.update(seq.block_table[seq.first_block :])
            ends[seq.published] += 1
            num_filled += seq.num_computed_tokens - seq.first_block * self.block_size
            self._check_published(seq)
        assert self.num_filled == num_filled, "computed positions are miscounted"
        assert self.num_slots == held.total() * self.block_size, "positions are miscounted"
        assert [held.get(block, 0) for block in range(self.num_blocks)] == refs, "reference counts drifted"
        assert len(set(free)) == len(free), "a block was freed twice"
        self.tree.check(refs, ends)
        unused = {block for block, num_held in enumerate(refs) if not num_held} - self.tree.node_of.keys()
        assert unused == set(free), f"blocks lost, or free and in use: {unused ^ set(free)}"

    def _check_published(self, seq: Sequence) -> None:
        node: Node | None = seq.published
        depth = node.depth if node else 0
        assert depth * self.block_size <= seq.num_computed_tokens, "published before it was computed"
        while node is not None and node.depth > seq.first_block:
            assert seq.block_table[node.depth - 1] == node.block, "the table of a sequence left its published path"
            node = node.parent
