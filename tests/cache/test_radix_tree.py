"""The prefix index by itself."""

from __future__ import annotations

import sys

import pytest

from octavo.cache.node import Node
from octavo.cache.radix_tree import RadixTree


def insert_path(tree: RadixTree, tokens: list[int | None], blocks: list[int], salt: str = "") -> list[Node]:
    node, nodes = tree.root, []
    for index, block in enumerate(blocks):
        node = tree.insert(node, tree.edge(tokens, index, salt), block, ("", ""))
        nodes.append(node)
    return nodes


def test_finds_full_blocks_only() -> None:
    tree = RadixTree(2)
    insert_path(tree, [1, 2, 3, 4], [7, 8])
    assert tree.find([1, 2, 3, 4, 5], 2, "").path() == [7, 8]
    assert tree.find([1, 2, 3, 4, 5], 1, "").path() == [7]
    assert tree.find([1, 2, 3, 9], 2, "").path() == [7]
    assert tree.find([1, 9, 3, 4], 2, "").path() == []


def test_equal_tokens_after_another_prefix_are_not_found() -> None:
    tree = RadixTree(2)
    insert_path(tree, [1, 2, 3, 4], [7, 8])
    assert tree.find([3, 4], 1, "").path() == []


def test_salts_never_meet() -> None:
    tree = RadixTree(2)
    insert_path(tree, [1, 2, 3, 4], [0, 1], "a")
    insert_path(tree, [1, 2, 3, 4], [2, 3], "b")
    assert tree.find([1, 2, 3, 4], 2, "a").path() == [0, 1]
    assert tree.find([1, 2, 3, 4], 2, "b").path() == [2, 3]
    assert tree.find([1, 2, 3, 4], 2, "").path() == []


def test_evicts_what_rested_longest_and_forgets_it() -> None:
    tree = RadixTree(1)
    insert_path(tree, [1, 2], [0, 1])
    insert_path(tree, [3], [2])
    for block in (1, 2, 0):
        assert tree.rest(block)
    assert [tree.evict(), tree.evict()] == [1, 2]
    assert tree.find([1, 2], 2, "").path() == [0]
    assert tree.evict() == 0
    assert tree.node_of == {}
    assert tree.root.children == {}


def test_a_block_in_use_again_is_not_evicted() -> None:
    tree = RadixTree(1)
    insert_path(tree, [1], [0])
    insert_path(tree, [2], [1])
    tree.rest(0)
    tree.rest(1)
    tree.wake(0)
    assert tree.evict() == 1
    with pytest.raises(IndexError):
        tree.evict()


def test_resting_is_refused_for_a_block_that_was_never_cached() -> None:
    assert not RadixTree(1).rest(0)


def test_a_path_deeper_than_the_recursion_limit() -> None:
    depth = 32_768
    assert depth > sys.getrecursionlimit()
    tree = RadixTree(1)
    tokens: list[int | None] = [t % 7 for t in range(depth)]
    nodes = insert_path(tree, tokens, list(range(depth)))
    assert nodes[-1].depth == depth
    assert tree.find(tokens, depth, "").path() == list(range(depth))
    assert sum(1 for _ in tree.walk()) == depth
    for block in reversed(range(depth)):
        tree.rest(block)
    assert [tree.evict() for _ in range(depth)] == list(reversed(range(depth)))
