"""A cache of a model in which only some layers have windows: two pools, asked as one."""

from __future__ import annotations

import random
from typing import Any

import pytest

from octavo.cache.hybrid_cache import HybridCache
from octavo.cache.kv_cache import KVCache
from octavo.cache.kv_events import KVEvents, Removed, Stored
from octavo.engine.gauges import snapshot
from octavo.engine.scheduler import Scheduler
from octavo.engine.victims import largest
from octavo.errors import ConfigError, ContextLengthExceeded
from octavo.types import EngineStats, Sequence
from tests.cache.test_kv_cache import make_sequence
from tests.cache.test_window import begin, walk
from tests.engine.making import make_request

TOKENS = list(range(20))


def used(cache: KVCache) -> tuple[int, int]:
    return cache.num_used, cache.whole.num_used


def end(cache: KVCache, seq: Sequence) -> None:
    cache.release(seq)
    cache.check([])


def test_layers_with_windows_give_back_what_the_others_keep() -> None:
    cache = HybridCache(6, 10, 2, window=5)
    seq = begin(cache, TOKENS)
    assert walk(cache, seq, 20, 4) <= cache.most_held(20, 4) == 6
    assert used(cache) == (2, 10)
    assert cache.num_cached == 4
    assert cache.whole.num_cached == 0
    end(cache, seq)
    assert used(cache) == (0, 0)
    assert (cache.num_empty_slots, cache.whole.num_empty_slots) == (0, 0)


def test_without_a_prefix_cache_it_is_free_at_once() -> None:
    cache = HybridCache(6, 10, 2, enable_prefix_caching=False, window=5)
    seq = begin(cache, TOKENS)
    walk(cache, seq, 20, 4)
    assert (cache.num_free, cache.whole.num_free) == (4, 0)
    end(cache, seq)
    assert (cache.num_free, cache.whole.num_free) == (6, 10)


def test_a_prefix_needs_all_of_one_pool_and_its_last_window_of_the_other() -> None:
    cache = HybridCache(10, 10, 2, window=5)
    seq = begin(cache, TOKENS)
    walk(cache, seq, 20, 4)
    end(cache, seq)
    cache.evict(6)  # those that were given back first
    assert snapshot(EngineStats(), cache, 0, 0).num_evictions == 6
    longer = make_sequence([*TOKENS, 20, 21])
    assert cache.match(longer).depth == 10
    assert cache.match(make_sequence([*TOKENS[:12], 99])).depth == 0, "its window is gone"
    cache.adopt(longer, cache.match(longer))
    assert (longer.num_computed_tokens, longer.first_block) == (20, 8)
    assert used(cache) == (2, 10)
    cache.check([longer])
    end(cache, longer)
    cache.whole.evict(1)  # the last block, of which only the layers with windows are left
    assert snapshot(EngineStats(), cache, 0, 0).num_evictions == 7
    assert cache.match(make_sequence([*TOKENS, 20, 21])).depth == 9
    cache.check([])


def test_a_window_that_is_gone_leaves_a_shorter_prefix() -> None:
    cache = HybridCache(10, 10, 1, window=3)
    seq = begin(cache, TOKENS[:10])
    walk(cache, seq, 10, 1)
    end(cache, seq)
    first = begin(cache, [*TOKENS[:5], 99])
    assert first.num_computed_tokens == 5
    cache.evict(8)  # all but the window that somebody holds
    assert cache.num_cached == 0
    other = make_sequence(TOKENS)
    assert cache.match(other).depth == 5, "ten blocks are there in one pool, and a window behind the fifth in the other"
    cache.check([first])


def test_nothing_is_reserved_where_one_pool_is_short() -> None:
    for num_blocks, num_whole in ((3, 9), (9, 3)):
        cache = HybridCache(num_blocks, num_whole, 2, window=5)
        seq = begin(cache, TOKENS)
        assert not cache.reserve(seq, 7)
        assert used(cache) == (0, 0)
        assert cache.reserve(seq, 6)
        assert used(cache) == (3, 3)
        cache.check([seq])
        end(cache, seq)


def test_who_starts_gets_a_step_of_one_pool_and_everything_of_the_other() -> None:
    cache = HybridCache(4, 12, 2, window=5)
    seq, other = make_sequence(TOKENS), make_sequence([50, 51, 52])
    assert not cache.admits(seq, cache.tree.root, 9), "a step of five blocks"
    assert cache.admits(seq, cache.tree.root, 4)
    cache.start(seq, cache.match(seq), True, 4)
    assert used(cache) == (2, 10)
    assert cache.admits(other, cache.tree.root, 3)
    assert not cache.admits(other, cache.tree.root, 3, num_spare=1)
    cache.check([seq])


def test_as_much_of_a_block_is_copied_as_both_pools_have() -> None:
    cache = HybridCache(12, 12, 4, window=5)
    copies: list[tuple[Any, ...]] = []
    cache.copy_slots = lambda *part: copies.append(("window", *part))
    cache.whole.copy_slots = lambda *part: copies.append(("whole", *part))
    seq = begin(cache, TOKENS)
    walk(cache, seq, 20, 4)
    last = [seq.block_table[-1], cache.in_whole(seq).block_table[-1]]
    end(cache, seq)
    again = make_sequence([*TOKENS[:19], 99])
    cache.start(again, cache.match(again), True)
    tables = again.block_table, cache.in_whole(again).block_table
    assert copies == [("window", last[0], tables[0][4], 3), ("whole", last[1], tables[1][4], 3)]
    assert (again.num_computed_tokens, cache.num_copied) == (19, 3)
    cache.check([again])
    end(cache, again)
    cache.whole.evict(1)
    once_more = make_sequence([*TOKENS[:19], 98])
    cache.start(once_more, cache.match(once_more), True)
    assert (once_more.num_computed_tokens, len(copies)) == (16, 2), "only one pool has the block to copy from"
    cache.check([once_more])


def test_events_tell_of_the_layers_that_see_everything() -> None:
    events = KVEvents()
    cache = HybridCache(6, 10, 2, window=5, events=events)
    seq = begin(cache, TOKENS)
    walk(cache, seq, 20, 4)
    cache.release(seq)
    cache.evict(6)
    cache.whole.evict(1)
    assert [type(event) for event in events.take()] == [Stored] * 10 + [Removed]


def test_gauges_are_of_both_pools_and_the_largest_holds_most_of_the_layers_that_see_everything() -> None:
    cache = HybridCache(20, 20, 2, window=5)
    long, short = begin(cache, TOKENS), begin(cache, [50, 51, 52, 53, 54, 55, 56, 57, 58])
    walk(cache, long, 20, 4, [short])
    walk(cache, short, 9, 9, [long])
    stats = snapshot(EngineStats(num_blocks=cache.whole.num_blocks), cache, 0, 0)
    assert (stats.num_blocks, stats.num_used_blocks, stats.num_empty_slots) == (20, 15, 1)
    assert (stats.num_window_blocks, stats.num_used_window_blocks) == (20, 2 + 3)
    assert len(short.block_table) - short.first_block > len(long.block_table) - long.first_block
    assert largest(iter([short, long])) is long


def test_what_cannot_be_is_refused() -> None:
    cache = HybridCache(6, 10, 2, window=5)
    with pytest.raises(ConfigError, match="kv_offload_memory"):
        cache.use_offload(None)  # type: ignore[arg-type]
    scheduler = Scheduler(cache, max_num_seqs=2, max_num_batched_tokens=4)
    scheduler.add(make_request(0, 17, 4))
    with pytest.raises(ContextLengthExceeded, match="room for 20 tokens"):
        scheduler.add(make_request(1, 17, 5))
    with pytest.raises(ContextLengthExceeded):
        Scheduler(cache, max_num_seqs=2, max_num_batched_tokens=6).add(make_request(0, 17, 4))


def test_more_sequences_fit_into_the_same_memory() -> None:
    """Half of the layers have windows: 60 blocks of all layers, or 24 and 96."""
    for cache, most in ((KVCache(60, 2), 6), (HybridCache(24, 96, 2, window=5), 9)):
        held = []
        for i in range(12):
            seq = make_sequence([100 + i, *TOKENS[1:]])
            if not cache.admits(seq, cache.match(seq), 4 if cache.window else 20):
                break
            cache.start(seq, cache.match(seq), True, 4 if cache.window else None)
            walk(cache, seq, 20, 4, held)
            held.append(seq)
        assert len(held) == most


def test_random_sequences_share_and_give_back_in_both_pools() -> None:
    rng = random.Random(0)
    for _ in range(60):
        block_size, window, chunk = rng.choice([1, 2, 4]), rng.choice([1, 3, 9]), rng.choice([1, 3, 8])
        most = -(-(window + chunk) // block_size) + 1
        cache = HybridCache(most + rng.randrange(6), 60 // block_size + rng.randrange(6), block_size, window=window)
        for _ in range(8):
            tokens = [rng.randrange(2) for _ in range(rng.randrange(1, 60))]
            seq = begin(cache, tokens)
            assert walk(cache, seq, len(tokens), chunk) <= most
            assert len(cache.in_whole(seq).block_table) == cache.blocks_for(len(tokens))
            end(cache, seq)
