"""A cache of several KV groups: full attention and sliding windows, asked as one."""

from __future__ import annotations

import random
from typing import Any

import pytest

from octavo.cache.group_cache import GroupCache, GroupSize
from octavo.cache.kv_cache import KVCache
from octavo.cache.kv_events import KVEvents, Removed, Stored
from octavo.engine.cache_report import snapshot
from octavo.engine.policies.victims import largest
from octavo.engine.scheduler import Scheduler
from octavo.errors import ConfigError, ContextLengthExceeded
from octavo.types import EngineStats, KVGroupStats, Sequence
from tests.cache.test_window import begin, sequence_of, walk
from tests.engine.making import make_request
from tests.tiers import nightly_after

TOKENS = list(range(20))


def used(cache: KVCache) -> tuple[int, int]:
    return cache.groups[1].num_used, cache.groups[0].num_used


def end(cache: KVCache, seq: Sequence) -> None:
    cache.release(seq)
    cache.check([])


def test_layers_with_windows_give_back_what_the_others_keep() -> None:
    cache = KVCache([GroupSize(10), GroupSize(6, 5)], 2)
    seq = begin(cache, TOKENS)
    assert walk(cache, seq, 20, 4) <= cache.groups[1].most_held(20, 4) == 6
    assert used(cache) == (2, 10)
    assert cache.groups[1].num_cached == 4
    assert cache.groups[0].num_cached == 0
    end(cache, seq)
    assert used(cache) == (0, 0)
    assert (cache.num_empty_slots, cache.num_filled) == (0, 0)


def test_without_a_prefix_cache_it_is_free_at_once() -> None:
    cache = KVCache([GroupSize(10), GroupSize(6, 5)], 2, enable_prefix_caching=False)
    seq = begin(cache, TOKENS)
    walk(cache, seq, 20, 4)
    assert (cache.groups[1].num_free, cache.groups[0].num_free) == (4, 0)
    end(cache, seq)
    assert (cache.groups[1].num_free, cache.groups[0].num_free) == (6, 10)


def test_a_prefix_needs_all_of_full_attention_and_its_last_window_of_the_other_group() -> None:
    cache = KVCache([GroupSize(10), GroupSize(10, 5)], 2)
    seq = begin(cache, TOKENS)
    walk(cache, seq, 20, 4)
    end(cache, seq)
    cache.groups[1].evict(6)  # those that were given back first
    longer = sequence_of(cache, [*TOKENS, 20, 21])
    assert cache.match(longer)[0].depth == 10
    assert cache.match(sequence_of(cache, [*TOKENS[:12], 99]))[0].depth == 0, "its window is gone"
    cache.adopt(longer, cache.match(longer))
    assert (longer.num_computed_tokens, longer.groups[1].first_block) == (20, 8)
    assert used(cache) == (2, 10)
    cache.check([longer])
    end(cache, longer)
    cache.groups[0].evict(1)  # the last block, of which only the layers with windows are left
    assert cache.match(sequence_of(cache, [*TOKENS, 20, 21]))[0].depth == 9
    cache.check([])


def test_a_window_that_is_gone_leaves_a_shorter_prefix() -> None:
    cache = KVCache([GroupSize(10), GroupSize(10, 3)], 1)
    seq = begin(cache, TOKENS[:10])
    walk(cache, seq, 10, 1)
    end(cache, seq)
    first = begin(cache, [*TOKENS[:5], 99])
    assert first.num_computed_tokens == 5
    cache.groups[1].evict(8)  # all but the window that somebody holds
    assert cache.groups[1].num_cached == 0
    other = sequence_of(cache, TOKENS)
    assert cache.match(other)[0].depth == 5, "ten blocks are there in one group, a window behind the fifth in the other"
    cache.check([first])


def test_nothing_is_reserved_where_one_group_is_short() -> None:
    for num_blocks, num_whole in ((3, 9), (9, 3)):
        cache = KVCache([GroupSize(num_whole), GroupSize(num_blocks, 5)], 2)
        seq = begin(cache, TOKENS)
        assert not cache.reserve(seq, 7)
        assert used(cache) == (0, 0)
        assert cache.reserve(seq, 6)
        assert used(cache) == (3, 3)
        cache.check([seq])
        end(cache, seq)


def test_a_new_sequence_gets_blocks_for_all_tokens_or_with_a_window_for_one_step() -> None:
    cache = KVCache([GroupSize(12), GroupSize(4, 5)], 2)
    seq, other = sequence_of(cache, TOKENS), sequence_of(cache, [50, 51, 52])
    assert not cache.admits(seq, cache.roots(seq), 9), "a step of five blocks"
    assert cache.admits(seq, cache.roots(seq), 4)
    cache.start(seq, cache.match(seq), True, 4)
    assert used(cache) == (2, 10)
    assert cache.admits(other, cache.roots(other), 3)
    assert not cache.admits(other, cache.roots(other), 3, num_spare=1)
    cache.check([seq])


def test_as_much_of_a_block_is_copied_as_all_groups_have() -> None:
    cache = KVCache([GroupSize(12), GroupSize(12, 5)], 4)
    copies: list[tuple[Any, ...]] = []
    cache.copy_slots = lambda *part: copies.append(part)
    seq = begin(cache, TOKENS)
    walk(cache, seq, 20, 4)
    last = [held.block_table[-1] for held in seq.groups]
    end(cache, seq)
    again = sequence_of(cache, [*TOKENS[:19], 99])
    cache.start(again, cache.match(again), True, 20)
    assert copies == [(group, last[group], again.groups[group].block_table[4], 3) for group in (0, 1)]
    assert (again.num_computed_tokens, cache.num_copied) == (19, 3)
    cache.check([again])
    end(cache, again)
    cache.groups[0].evict(1)
    once_more = sequence_of(cache, [*TOKENS[:19], 98])
    cache.start(once_more, cache.match(once_more), True, 20)
    assert (once_more.num_computed_tokens, len(copies)) == (16, 2), "only one group has the block to copy from"
    cache.check([once_more])


def test_events_tell_of_the_first_group() -> None:
    events = KVEvents()
    cache = KVCache([GroupSize(10), GroupSize(6, 5)], 2, events=events)
    seq = begin(cache, TOKENS)
    walk(cache, seq, 20, 4)
    cache.release(seq)
    cache.groups[1].evict(6)
    cache.groups[0].evict(1)
    assert [type(event) for event in events.take()] == [Stored] * 10 + [Removed]


def test_gauges_are_of_all_groups_and_the_largest_holds_most_of_the_first() -> None:
    cache = KVCache([GroupSize(20), GroupSize(20, 5)], 2)
    long, short = begin(cache, TOKENS), begin(cache, [50, 51, 52, 53, 54, 55, 56, 57, 58])
    walk(cache, long, 20, 4, [short])
    walk(cache, short, 9, 9, [long])
    stats = snapshot(EngineStats(num_blocks=cache.groups[0].num_blocks), cache, 0, 0)
    assert (stats.num_blocks, stats.num_used_blocks, stats.num_empty_slots) == (20, 15, 1)
    assert stats.kv_groups == [KVGroupStats(0, 20, 15, 0), KVGroupStats(5, 20, 2 + 3, 8 + 2)]
    assert short.groups[1].num_held > long.groups[1].num_held
    assert largest(iter([short, long])) is long


def test_what_cannot_be_is_refused() -> None:
    cache = KVCache([GroupSize(10), GroupSize(6, 5)], 2)
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
    for cache, most in ((KVCache(60, 2), 6), (KVCache([GroupSize(96), GroupSize(24, 5)], 2), 9)):
        held = []
        for i in range(12):
            seq = sequence_of(cache, [100 + i, *TOKENS[1:]])
            if not cache.admits(seq, cache.match(seq), 4):
                break
            cache.start(seq, cache.match(seq), True, 4)
            walk(cache, seq, 20, 4, held)
            held.append(seq)
        assert len(held) == most


def test_a_prefix_is_as_long_as_all_groups_agree() -> None:
    """Each group alone would find more: full attention 10 blocks, a window 9, the other 7."""
    cache = KVCache([GroupSize(12), GroupSize(12, 5), GroupSize(12, 3)], 1)
    seq = begin(cache, TOKENS[:10])
    walk(cache, seq, 10, 1)
    end(cache, seq)
    full, wide, narrow = cache.groups
    assert [end.depth for end in cache.match(sequence_of(cache, TOKENS))] == [10, 10, 10]
    _forget(wide, 10, 4)  # what is left ends windows behind blocks 9, 8 and, at the beginning, 3 to 0
    _forget(narrow, 10, 9, 6)  # behind 8 and 5 to 0
    waiting = sequence_of(cache, TOKENS)
    alone = [group.match(waiting, 10).depth for group in cache.groups]
    assert alone == [10, 9, 8]
    assert [end.depth for end in cache.match(waiting)] == [8, 8, 8]
    _forget(narrow, 8)
    assert [end.depth for end in cache.match(waiting)] == [3, 3, 3]
    cache.adopt(waiting, cache.match(waiting))
    assert [held.block_table[held.first_block :] != [] for held in waiting.groups] == [True] * 3
    cache.check([waiting])
    assert full.num_used == 3


def _forget(group: GroupCache, *depths: int) -> None:
    """Evict the idle blocks at these depths."""
    for node in [node for node in group.tree.walk() if node.depth in depths]:
        group.tree.idle.remove(node)
        block, node.block = node.block, -1
        del group.tree.node_of[block]
        group.tree._prune(node)
        group.pool.free(block)


@pytest.mark.slow
@pytest.mark.parametrize("num_caches", nightly_after(1, (45, 90)))
def test_random_sequences_share_and_give_back_in_all_groups(num_caches: int) -> None:
    rng = random.Random(0)
    for _ in range(num_caches):
        block_size, chunk = rng.choice([1, 2, 4]), rng.choice([1, 3, 8])
        windows = sorted(rng.sample([1, 3, 5, 9], rng.choice([1, 2, 3])), reverse=True)
        least = [-(-(window + chunk) // block_size) + 1 for window in windows]
        sizes = [GroupSize(most + rng.randrange(6), window) for most, window in zip(least, windows, strict=True)]
        has_full = rng.random() < 0.7
        cache = KVCache([*[GroupSize(60 // block_size + rng.randrange(6))] * has_full, *sizes], block_size)
        for _ in range(8):
            tokens = [rng.randrange(2) for _ in range(rng.randrange(1, 60))]
            seq = begin(cache, tokens)
            assert walk(cache, seq, len(tokens), chunk) <= least[-1]
            if has_full:
                assert seq.groups[0].num_held == cache.groups[0].blocks_for(len(tokens))
            end(cache, seq)
