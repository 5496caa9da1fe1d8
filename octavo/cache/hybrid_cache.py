"""The cache of a model in which only some layers have windows: a pool of blocks for these, and one for the others.

Blocks have one size. A ``KVCache`` with a window has those of the layers with windows, and takes back what is behind;
one without has the others'. Each has a tree of its own, and gives up idle blocks in its own order: a prefix is found as
far as one tree has all of it, and the other the last window of it::

    whole     a a a a b b b c c c .        tables of one sequence, a letter for what was computed together:
    windows   . . . . . . . c c c .        it holds all of the first pool, and a window and a step of the second
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from octavo.cache.kv_cache import KVCache
from octavo.cache.kv_events import KVEvents
from octavo.cache.node import Node
from octavo.cache.offload import Offload
from octavo.errors import ConfigError
from octavo.types import Sequence


class HybridCache(KVCache):
    """A cache with a window, and ``whole`` beside it: whatever is asked for happens in both, or in none.

    A sequence holds in ``whole`` what ``seq.whole`` says. That table is never shorter than its own: all tokens of a
    prompt get blocks there when it is admitted, while blocks of the layers with windows are enough for a step, as they
    come back on the way. Events tell of ``whole`` alone.
    """

    def __init__(
        self,
        num_blocks: int,
        num_whole_blocks: int,
        block_size: int,
        enable_prefix_caching: bool = True,
        *,
        window: int,
        eviction: str = "lru",
        watermark: float = 0.0,
        events: KVEvents | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``num_blocks`` of the layers with windows, of which the widest is ``window``."""
        super().__init__(
            num_blocks,
            block_size,
            enable_prefix_caching,
            eviction=eviction,
            watermark=watermark,
            window=window,
            clock=clock,
        )
        self._whole = KVCache(
            num_whole_blocks,
            block_size,
            enable_prefix_caching,
            eviction=eviction,
            watermark=watermark,
            events=events,
            clock=clock,
        )

    @property
    def whole(self) -> KVCache:
        return self._whole

    def in_whole(self, seq: Sequence) -> Sequence:
        """What ``seq`` holds in ``whole``, brought up to date."""
        if seq.whole is None:
            seq.whole = Sequence(seq.request)
            seq.whole.tokens = seq.tokens
        seq.whole.num_computed_tokens = seq.num_computed_tokens
        return seq.whole

    def could_hold(self, num_tokens: int, max_step_tokens: int) -> bool:
        is_enough = super().could_hold(num_tokens, max_step_tokens)
        return is_enough and self._whole.could_hold(num_tokens, max_step_tokens)

    def match(self, seq: Sequence) -> Node:
        """See ``KVCache.match``; a node of the tree of the layers with windows."""
        return self._match_recent(seq, self._whole.match(self.in_whole(seq)).depth)

    def _node_in_whole(self, seq: Sequence, node: Node) -> Node:
        """The end in ``whole`` of the prefix that ``match`` found to end at ``node``, or of none."""
        root = self._whole.tree.root
        found: Node = self.in_whole(seq).matched or root
        while found.depth > node.depth:
            found = found.parent or root
        return found

    def admits(self, seq: Sequence, node: Node, num_tokens: int, num_spare: int = 0) -> bool:
        is_there = self.fits(node, num_tokens, num_spare)
        return is_there and self._whole.fits(self._node_in_whole(seq, node), len(seq.tokens), num_spare)

    def adopt(self, seq: Sequence, node: Node) -> None:
        node_in_whole = self._node_in_whole(seq, node)
        super().adopt(seq, node)
        self._whole.adopt(self.in_whole(seq), node_in_whole)

    def start(self, seq: Sequence, node: Node, shares: bool, num_tokens: int | None = None) -> None:
        """See ``KVCache.start``. Of a block that begins like the next tokens, as much is copied as both pools have."""
        self.adopt(seq, node)
        whole = self.in_whole(seq)
        source, num_copied = self.find_part(seq, node) if shares else (-1, 0)
        other, num_others = self._whole.find_part(whole, whole.published) if num_copied else (-1, 0)
        num_copied = min(num_copied, num_others)
        self.reserve(seq, num_tokens or len(seq.tokens))
        self._whole.reserve(whole, len(seq.tokens))
        if num_copied and self.copy_slots is not None and self._whole.copy_slots is not None:
            self.copy_slots(source, seq.block_table[node.depth], num_copied)
            self._whole.copy_slots(other, whole.block_table[node.depth], num_copied)
            self.note_copied(seq, num_copied)

    def note_filled(self, num_tokens: int) -> None:
        super().note_filled(num_tokens)
        self._whole.note_filled(num_tokens)

    def use_offload(self, offload: Offload) -> None:
        raise ConfigError("kv_offload_memory: blocks of two pools cannot be kept in slower memory")

    def reserve(self, seq: Sequence, num_tokens: int) -> bool:
        whole = self.in_whole(seq)
        num_missing = self.blocks_for(num_tokens) - len(whole.block_table)
        if num_missing > self._whole.num_free + self._whole.num_cached:
            return False
        return super().reserve(seq, num_tokens) and self._whole.reserve(whole, num_tokens)

    def publish(self, seq: Sequence, num_tokens: int) -> None:
        super().publish(seq, num_tokens)
        self._whole.publish(self.in_whole(seq), num_tokens)

    def truncate(self, seq: Sequence, num_tokens: int) -> None:
        whole = self.in_whole(seq)
        super().truncate(seq, num_tokens)
        self._whole.truncate(whole, num_tokens)

    def release(self, seq: Sequence) -> None:
        whole = self.in_whole(seq)
        super().release(seq)
        self._whole.release(whole)

    def check(self, holders: Iterable[Sequence]) -> None:
        holders = list(holders)
        super().check(holders)
        self._whole.check([self.in_whole(seq) for seq in holders])
        for seq in holders:
            whole = self.in_whole(seq)
            assert len(whole.block_table) >= len(seq.block_table), "a table is shorter than that of the windows"
            depths = [held.published.depth if held.published else 0 for held in (seq, whole)]
            assert depths[0] == depths[1], "a sequence is published in one tree, and not in the other"
