"""What must hold of the cache's books between two steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Several
from typing import TYPE_CHECKING

from octavo.cache.node import Node
from octavo.types import Sequence

if TYPE_CHECKING:
    from octavo.cache.kv_cache import KVCache


def check_cache(cache: KVCache, holders: Several[Sequence]) -> None:
    """Assert it, given all sequences that hold blocks. Costs O(pool)."""
    refs, free = cache.pool.refs, cache.pool.free_blocks
    held: Counter[int] = Counter()
    num_filled = 0
    for seq in holders:
        held.update(seq.block_table[seq.first_block :])
        num_filled += seq.num_computed_tokens - seq.first_block * cache.block_size
        _check_published(cache, seq)
    assert cache.num_filled == num_filled, "computed positions are miscounted"
    assert cache.num_slots == held.total() * cache.block_size, "positions are miscounted"
    assert [held.get(block, 0) for block in range(cache.num_blocks)] == refs, "reference counts drifted"
    assert len(set(free)) == len(free), "a block was freed twice"
    _check_tree(cache, Counter(seq.published for seq in holders))
    unused = {block for block, num_held in enumerate(refs) if not num_held} - cache.tree.node_of.keys()
    assert unused == set(free), f"blocks lost, or free and in use: {unused ^ set(free)}"


def _check_tree(cache: KVCache, ends: Counter[Node]) -> None:
    tree, refs = cache.tree, cache.pool.refs
    root, window, block_size, node_of = tree.root, cache.window, cache.block_size, tree.node_of
    idle: set[Node] = set()
    in_tree: set[int] = set()
    for node in tree.walk():
        above = node.parent
        assert above is not None
        assert len(node.edge) == block_size + (above is root), "a block was cached before it was full"
        assert node.depth == above.depth + 1, "depths do not count up"
        assert node.num_ends == ends.get(node, 0), "published paths are miscounted"
        if node.block < 0:
            assert window, "a block was given up before what is below it"
            assert node.children or node.num_ends, "a node without a block is in nobody's way"
            assert not node.is_idle, "a block that is not there is idle"
            continue
        assert node_of.get(node.block) is node, "tree and block index disagree"
        assert node.is_idle == (refs[node.block] == 0), "a held block is idle, or an idle one is not"
        in_tree.add(node.block)
        if node.is_idle:
            idle.add(node)
        if above is not root and not window:
            assert refs[above.block] >= refs[node.block], "a parent is held by fewer than its child"
            assert node.is_idle or not above.is_idle, "an idle block has a child that is held"
    assert in_tree == node_of.keys(), "a cached block cannot be reached from the root"
    assert len(idle) == len(tree.idle), "idle blocks are miscounted"
    tree.idle.check({node for node in idle if window or not node.children})


def _check_published(cache: KVCache, seq: Sequence) -> None:
    node: Node | None = seq.published
    depth = node.depth if node else 0
    assert depth * cache.block_size <= seq.num_computed_tokens, "published before it was computed"
    while node is not None and node.depth > seq.first_block:
        assert seq.block_table[node.depth - 1] == node.block, "the table of a sequence left its published path"
        node = node.parent
