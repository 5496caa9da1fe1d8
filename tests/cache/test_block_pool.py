"""The free list and the reference counts."""

from __future__ import annotations

from octavo.cache.group_cache import BlockPool


def test_each_block_is_taken_once() -> None:
    pool = BlockPool(3)
    assert sorted(pool.take() for _ in range(3)) == [0, 1, 2]
    assert pool.num_free == 0
    assert pool.refs == [1, 1, 1]


def test_a_shared_block_needs_as_many_drops() -> None:
    pool = BlockPool(1)
    block = pool.take()
    pool.share(block)
    assert not pool.drop(block)
    assert pool.drop(block)
    assert pool.num_free == 0, "only its owner knows whether the content is still wanted"
    pool.free(block)
    assert pool.num_free == 1
    assert pool.take() == block
