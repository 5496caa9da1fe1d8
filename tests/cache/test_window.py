"""A cache of a model without a layer that looks back further than a window."""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest

from octavo.cache.group_cache import GroupSize
from octavo.cache.kv_cache import KVCache
from octavo.types import Sequence
from tests.cache.test_kv_cache import fill, make_sequence

TOKENS = list(range(20))


def walk(cache: KVCache, seq: Sequence, num_tokens: int, chunk: int, others: Iterable[Sequence] = ()) -> int:
    """Compute ``seq`` up to ``num_tokens`` in chunks, as the scheduler does; the most blocks of the last group that are
    in use on the way."""
    most = 0
    while seq.num_computed_tokens < num_tokens:
        end = min(seq.num_computed_tokens + chunk, num_tokens)
        assert cache.reserve(seq, end)
        most = max(most, cache.groups[-1].num_used)
        fill(cache, seq, end)
        cache.publish(seq, end)
        cache.slide(seq, end)
        cache.check([seq, *others])
    return most


def begin(cache: KVCache, tokens: list[int]) -> Sequence:
    seq = sequence_of(cache, tokens)
    cache.adopt(seq, cache.match(seq))
    return seq


def sequence_of(cache: KVCache, tokens: list[int]) -> Sequence:
    """One that holds nothing yet in each of the cache's groups."""
    seq = make_sequence(tokens)
    seq.groups = cache.no_blocks()
    return seq


def test_what_is_behind_the_window_is_given_back_and_stays_findable() -> None:
    cache = KVCache([GroupSize(10, 5)], 2)
    seq = begin(cache, TOKENS)
    assert walk(cache, seq, 20, 4) <= cache.groups[0].most_held(20, 4) == 6
    assert (seq.groups[0].first_block, cache.groups[0].num_used, cache.groups[0].num_cached) == (8, 2, 8)
    assert cache.match(make_sequence([*TOKENS[:9], 99]))[0].depth == 4
    cache.release(seq)
    cache.check([])
    assert (cache.groups[0].num_used, cache.groups[0].num_cached, cache.num_empty_slots) == (0, 10, 0)


def test_without_a_prefix_cache_it_is_free_at_once() -> None:
    cache = KVCache([GroupSize(6, 5)], 2, enable_prefix_caching=False)
    seq = begin(cache, TOKENS)
    walk(cache, seq, 20, 4)
    assert (cache.groups[0].num_used, cache.groups[0].num_free) == (2, 4)
    cache.release(seq)
    cache.check([])
    assert cache.groups[0].num_free == 6


def test_a_prefix_is_found_by_its_last_window_alone() -> None:
    cache = KVCache([GroupSize(10, 5)], 2)
    seq = begin(cache, TOKENS)
    walk(cache, seq, 20, 4)
    cache.release(seq)
    cache.groups[0].evict(6)  # those that were given back first
    cache.check([])
    longer = begin(cache, [*TOKENS, 20, 21])
    assert (longer.num_computed_tokens, longer.groups[0].first_block) == (20, 8)
    assert cache.groups[0].num_used == 2
    cache.check([longer])
    assert cache.match(make_sequence([*TOKENS[:12], 99]))[0].depth == 0, "its window is gone"
    cache.release(longer)


def test_a_block_computed_again_takes_the_place_of_one_that_was_given_up() -> None:
    cache = KVCache([GroupSize(12, 5)], 2)
    seq = begin(cache, TOKENS)
    walk(cache, seq, 20, 4)
    cache.release(seq)
    cache.groups[0].evict(6)
    again = begin(cache, TOKENS[:13])
    assert again.num_computed_tokens == 0
    walk(cache, again, 13, 4)
    assert cache.match(make_sequence([*TOKENS[:12], 99]))[0].depth == 6
    cache.release(again)
    cache.check([])


def test_nodes_without_blocks_go_when_nothing_needs_them() -> None:
    cache = KVCache([GroupSize(10, 1)], 2)
    seq = begin(cache, TOKENS)
    walk(cache, seq, 20, 4)
    cache.groups[0].evict(cache.groups[0].num_cached)
    cache.check([seq])
    assert len(list(cache.groups[0].tree.walk())) == 10, "the path to the end of a sequence"
    waiting = make_sequence([*TOKENS, 99])
    assert cache.match(waiting)[0].depth == 0, "it would be found by a node that may go"
    cache.release(seq)
    cache.check([])
    assert not list(cache.groups[0].tree.walk())
    cache.adopt(waiting, cache.match(waiting))
    walk(cache, waiting, 21, 4)
    cache.release(waiting)
    cache.check([])


def test_random_sequences_never_hold_more_than_a_window_and_a_step() -> None:
    rng = random.Random(0)
    for _ in range(60):
        block_size, window, chunk = rng.choice([1, 2, 4]), rng.choice([1, 3, 9]), rng.choice([1, 3, 8])
        most = -(-(window + chunk) // block_size) + 1
        cache = KVCache([GroupSize(most + rng.randrange(6), window)], block_size, rng.random() < 0.8)
        for _ in range(8):
            tokens = [rng.randrange(2) for _ in range(rng.randrange(1, 60))]
            seq = begin(cache, tokens)
            assert walk(cache, seq, len(tokens), chunk) <= most
            cache.release(seq)
            cache.check([])


def test_ends_of_texts_outlive_what_a_long_text_leaves_behind() -> None:
    cache = KVCache([GroupSize(20, 5)], 2)
    ends = [[30 + i, *range(7)] for i in range(4)]
    for tokens in ends:
        seq = begin(cache, tokens)
        walk(cache, seq, 8, 4)
        cache.release(seq)
    seq = begin(cache, list(range(100, 160)))
    walk(cache, seq, 60, 4)
    cache.release(seq)
    cache.check([])
    assert [cache.match(make_sequence([*tokens, 99]))[0].depth for tokens in ends] == [4] * 4


def test_what_several_texts_begin_with_is_given_up_like_an_end() -> None:
    cache = KVCache([GroupSize(24, 5)], 2)
    for i in range(3):
        seq = begin(cache, [*TOKENS[:10], 50 + i, *TOKENS])
        assert seq.num_computed_tokens == (10 if i else 0)
        walk(cache, seq, 31, 4)
        cache.release(seq)
    long = begin(cache, list(range(100, 140)))
    walk(cache, long, 40, 4)
    cache.release(long)
    assert cache.match(make_sequence([*TOKENS[:10], 99]))[0].depth == 5
    cache.check([])


def test_a_match_is_repeated_only_when_the_tree_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = KVCache([GroupSize(10, 5)], 2)
    seq = begin(cache, TOKENS)
    walk(cache, seq, 20, 4)
    cache.release(seq)
    waiting, searches = make_sequence([*TOKENS, 99]), []
    find = cache.groups[0].tree.find_recent
    monkeypatch.setattr(cache.groups[0].tree, "find_recent", lambda *given: searches.append(given) or find(*given))
    assert [cache.match(waiting)[0].depth for _ in range(3)] == [10, 10, 10]
    assert len(searches) == 1
    cache.groups[0].evict(10)
    assert cache.match(waiting)[0].depth == 0
    walk(cache, begin(cache, TOKENS), 20, 4)
    assert cache.match(waiting)[0].depth == 10
