"""The KV cache as accounting: which block belongs to which sequence, and which can be found again.

Layers that cache the same positions are a KV group, and share one block table of each sequence. A ``GroupCache`` has
the blocks of one group; ``KVCache`` asks all groups at once, so that a sequence gets blocks in every group or in none,
and a prefix counts as far as every group has what it needs of it: full attention all of it, a sliding window the last
window::

    full attention    a a a a b b b c c c .     block tables of one sequence, a letter for what was computed together:
    sliding window    . . . . . . . c c c .     it holds all of the first, and a window and a step of the second

The tensors live elsewhere (``KVStorage``); here a block is a number. Verbs: ``match``, ``admits``, ``start``,
``adopt``, ``reserve``, ``publish``, ``slide``, ``truncate``, ``release``, ``check``. None of them costs more than the
tokens it is about.
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
from octavo.errors import ConfigError
from octavo.types import GroupBlocks, Request, Sequence

CopySlots = Callable[[int, int, int, int], None]
"""Copies the first positions of one block into another, given the KV group, both blocks and their number, before any
step that is submitted from now on."""


class KVCache:
    """Hands blocks of ``block_size`` token positions to sequences, and shares those with equal prefixes.

    ``groups`` are the KV groups, the one that reaches furthest back first; a number stands for one group of full
    attention with so many blocks. ``eviction`` is a policy of ``octavo.cache.eviction``. ``watermark`` is the share of
    the blocks that admission leaves alone, for those who run to grow into. ``events`` tell of the first group.
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
    ) -> None:
        self.block_size = block_size
        self.events = events
        self.groups = [
            GroupCache(
                index,
                size,
                block_size,
                enable_prefix_caching,
                eviction=eviction,
                watermark=watermark,
                events=None if index else events,
                clock=clock,
            )
            for index, size in enumerate([GroupSize(groups)] if isinstance(groups, int) else groups)
        ]
        self.sliding = [group for group in self.groups if group.window]
        """The groups that take back blocks behind a window."""
        self.offload: Offload | None = None
        """Where the contents of evicted blocks go, and come back from."""
        self.copy_slots: CopySlots | None = None
        """With it, a block is reused in part where the next tokens begin like it."""
        self.num_copied = 0
        """Positions that were copied in place of being computed."""
        self.num_filled = 0
        """Positions computed or in flight, of all sequences that hold blocks."""

    @property
    def num_blocks(self) -> int:
        """Blocks of the first group."""
        return self.groups[0].num_blocks

    @property
    def num_empty_slots(self) -> int:
        """Token positions of the first group's held blocks in which nothing is. Shared blocks are full, so each is
        counted once."""
        return self.groups[0].num_slots - self.num_filled

    @property
    def roots(self) -> list[Node]:
        """In each group, the end of a prefix of no tokens."""
        return [group.tree.root for group in self.groups]

    def no_blocks(self) -> list[GroupBlocks]:
        """``Sequence.groups`` of a new sequence."""
        return [GroupBlocks() for _ in self.groups]

    def could_hold(self, num_tokens: int, max_step_tokens: int) -> bool:
        """Whether all blocks together are enough for a sequence of ``num_tokens`` positions."""
        return all(group.most_held(num_tokens, max_step_tokens) <= group.num_blocks for group in self.groups)

    # ---- a sequence starts

    def match(self, seq: Sequence) -> list[Node]:
        """The end, in each group, of the longest prefix of ``seq`` that all groups have cached; never all of ``seq``.

        At least one token is left to compute, since sampling needs the logits after the last one.
        """
        least = (len(seq.tokens) - 1) // self.block_size
        while True:
            ends = [group.match(seq, least) for group in self.groups]
            depths = [end.depth for end in ends]
            least = min(depths)
            if least == max(depths):
                return ends

    def admits(self, seq: Sequence, ends: list[Node], max_step_tokens: int, num_spare: int = 0) -> bool:
        """Whether ``seq``, cached up to ``ends``, can be started, with ``num_spare`` blocks left in each group for
        others, if there are any: not less than the watermark then.

        That takes blocks for all its tokens; in a group with a window, for a step, as blocks come back on the way.
        """
        needs = self._first_needs(seq, ends, max_step_tokens)
        return all(group.fits(end, need, num_spare) for group, end, need in zip(self.groups, ends, needs, strict=True))

    def _first_needs(self, seq: Sequence, ends: list[Node], max_step_tokens: int) -> list[int]:
        """Positions that must have blocks in each group when ``seq`` is started."""
        num_tokens = len(seq.tokens)
        of_step = min(num_tokens, ends[0].depth * self.block_size + max_step_tokens)
        return [of_step if group.window else num_tokens for group in self.groups]

    def adopt(self, seq: Sequence, ends: list[Node]) -> None:
        """Start ``seq``, which holds nothing, with the blocks up to ``ends``, as ``match`` gave them."""
        for group, end in zip(self.groups, ends, strict=True):
            group.adopt(seq, end)
        seq.num_computed_tokens = seq.capacity = ends[0].depth * self.block_size
        self.num_filled += seq.num_computed_tokens

    def start(self, seq: Sequence, ends: list[Node], shares: bool, max_step_tokens: int) -> None:
        """Give ``seq``, which holds nothing, the blocks up to ``ends``, as ``match`` gave them, and the others that
        ``admits`` says are there. With ``shares``, more of them may have been computed elsewhere."""
        needs = self._first_needs(seq, ends, max_step_tokens)
        self.adopt(seq, ends)
        contents = self.recall(seq) if shares else []
        sources, num_copied = self._find_parts(seq, ends) if shares and not contents else ([], 0)
        for group, need in zip(self.groups, needs, strict=True):
            group.grow(seq, need)
        seq.capacity = self._capacity(seq)
        self.restore(seq, contents)
        if num_copied and self.copy_slots is not None:
            # Should a source have been evicted just now, it still has its content.
            for group, source in zip(self.groups, sources, strict=True):
                target = seq.groups[group.index].block_table[ends[0].depth]
                self.copy_slots(group.index, source, target, num_copied)
            seq.num_computed_tokens += num_copied
            self.num_filled += num_copied
            self.num_copied += num_copied

    def _find_parts(self, seq: Sequence, ends: list[Node]) -> tuple[list[int], int]:
        """In each group, the block that ``seq`` can copy most positions of, and how many can be copied in all."""
        if self.copy_slots is None:
            return [], 0
        parts = [group.find_part(seq, end) for group, end in zip(self.groups, ends, strict=True)]
        return [source for source, _ in parts], min(count for _, count in parts)

    def _capacity(self, seq: Sequence) -> int:
        return min([len(held.block_table) for held in seq.groups]) * self.block_size

    # ---- slower tiers

    def use_offload(self, offload: Offload) -> None:
        """Keep the contents of evicted blocks in ``offload``. Raises ``ConfigError`` where there are several groups."""
        if len(self.groups) > 1:
            raise ConfigError("kv_offload_memory: the model caches different positions in different layers")
        self.offload = offload
        self.groups[0].tree.on_evict = offload.save

    def prefetch(self, request: Request) -> Future[None] | None:
        """Start to bring what slower tiers have of ``request`` near; ``None`` when there is nothing to wait for."""
        if self.offload is None:
            return None
        tokens: list[int | None] = [*request.prompt_tokens, *request.output_tokens]
        end = self.groups[0].tree.find(tokens, (len(tokens) - 1) // self.block_size, request.cache_salt)
        return self.offload.prefetch(request, end.depth)

    def recall(self, seq: Sequence) -> list[bytes]:
        """What host memory has of the blocks that follow those that ``seq`` has just adopted.

        To be asked before blocks are reserved: what is evicted for them may push it out.
        """
        return [] if self.offload is None else self.offload.recall(seq, len(seq.groups[0].block_table))

    def restore(self, seq: Sequence, contents: list[bytes]) -> None:
        """Fill the first blocks that ``seq`` has reserved with ``contents``, as ``recall`` gave them.

        The last one is left to compute into.
        """
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

    # ---- a sequence goes on, and ends

    def note_filled(self, num_tokens: int) -> None:
        """So many more positions are computed or in flight; fewer, when negative."""
        self.num_filled += num_tokens

    def reserve(self, seq: Sequence, num_tokens: int) -> bool:
        """Grow the block tables of ``seq`` to cover ``num_tokens`` positions, or change nothing and say no."""
        if num_tokens <= seq.capacity:
            return True
        for group in self.groups:
            if not group.can_grow(seq, num_tokens):
                return False
        for group in self.groups:
            group.grow(seq, num_tokens)
        seq.capacity = -(-num_tokens // self.block_size) * self.block_size
        return True

    def publish(self, seq: Sequence, num_tokens: int) -> None:
        """Let others find the full blocks among the first ``num_tokens`` positions of ``seq``.

        Only committed positions may be published: a step in flight can still fail, and its keys and values
        would never have been written.
        """
        for group in self.groups:
            group.publish(seq, num_tokens)

    def slide(self, seq: Sequence, num_tokens: int) -> None:
        """Take back the blocks of ``seq`` that are behind windows, where ``num_tokens`` positions are committed.

        Steps in flight look back from later positions, and never write to earlier ones.
        """
        for group in self.sliding:
            group.slide(seq, num_tokens)

    def truncate(self, seq: Sequence, num_tokens: int) -> None:
        """Take back that positions from ``num_tokens`` on were computed, and the blocks of such positions only.

        None of them may be published, and no step in flight may write there.
        """
        for group in self.groups:
            group.truncate(seq, num_tokens)
        self.num_filled -= seq.num_computed_tokens - num_tokens
        seq.num_computed_tokens = num_tokens
        seq.capacity = self._capacity(seq)

    def release(self, seq: Sequence) -> None:
        """Take back all blocks of ``seq``; what it published stays findable until evicted."""
        for group in self.groups:
            group.release(seq)
        self.num_filled -= seq.num_computed_tokens
        seq.num_computed_tokens = seq.capacity = 0

    def check(self, holders: Iterable[Sequence]) -> None:
        """Assert that every block is accounted for, given all sequences that hold blocks. Costs O(pool)."""
        holders = list(holders)
        for group in self.groups:
            group.check(holders)
        assert self.num_filled == sum(seq.num_computed_tokens for seq in holders), "computed positions are miscounted"
        for seq in holders:
            assert len(seq.groups) == len(self.groups), "a sequence has not one entry for each group"
            assert seq.capacity == self._capacity(seq), "a sequence's capacity is not that of its tables"
            depths = {held.published.depth if held.published else 0 for held in seq.groups}
            assert len(depths) == 1, "a sequence is published in one group, and not in another"
