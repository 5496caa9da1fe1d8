"""Blocks that are reused in part, and positions that are taken back."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.cache.kv_cache import KVCache
from octavo.cache.radix_tree import RadixTree
from octavo.types import Sequence
from tests.cache.test_kv_cache import compute, fill, make_sequence
from tests.cache.test_radix_tree import insert_path
from tests.operations import count_lines
from tests.tiers import search_again

Copies = list[tuple[int, int, int]]


def copying_cache(num_blocks: int, block_size: int) -> tuple[KVCache, Copies]:
    cache = KVCache(num_blocks, block_size)
    copies: Copies = []
    cache.copy_slots = lambda group, source, target, num_tokens: copies.append((source, target, num_tokens))
    return cache, copies


def started(cache: KVCache, tokens: list[int], salt: str = "", shares: bool = True) -> Sequence:
    seq = make_sequence(tokens, salt)
    cache.start(seq, cache.match(seq), shares, 1)
    return seq


def test_what_a_block_begins_with_is_copied() -> None:
    cache, copies = copying_cache(8, 4)
    first = compute(cache, [1, 2, 3, 4, 5, 6, 7, 8])
    second = started(cache, [1, 2, 3, 4, 5, 6, 99, 8, 9])
    assert copies == [(first.groups[0].block_table[1], second.groups[0].block_table[1], 2)]
    assert second.groups[0].block_table[0] == first.groups[0].block_table[0]
    assert second.groups[0].block_table[1] != first.groups[0].block_table[1]
    assert (second.num_computed_tokens, cache.num_copied) == (6, 2)
    cache.check([first, second])


def test_a_token_is_left_to_compute() -> None:
    cache, copies = copying_cache(8, 4)
    compute(cache, [1, 2, 3, 4])
    assert started(cache, [1, 2, 3, 4]).num_computed_tokens == 3
    assert started(cache, [1, 2, 3]).num_computed_tokens == 2
    assert started(cache, [1]).num_computed_tokens == 0
    assert [num_tokens for _, _, num_tokens in copies] == [3, 2]


def test_the_block_with_the_longest_common_prefix_is_copied() -> None:
    rng = random.Random(3)
    for _ in range(300):
        tree = RadixTree(4)
        known = {tuple(rng.randrange(3) for _ in range(4)) for _ in range(rng.randrange(1, 30))}
        blocks = {edge: block for block, edge in enumerate(known)}
        for edge, block in blocks.items():
            insert_path(tree, list(edge), [block])
        for block in rng.sample(sorted(blocks.values()), len(blocks) // 3):  # and some are given up again
            tree.rest(block)
        for _ in range(len(blocks) // 3):
            tree.evict()
        there = {edge: block for edge, block in blocks.items() if block in tree.node_of}
        wanted: list[int | None] = [rng.randrange(3) for _ in range(4)]
        limit = rng.randrange(1, 4)
        lengths = {
            block: next((i for i in range(limit) if edge[i] != wanted[i]), limit) for edge, block in there.items()
        }
        block, num_tokens = tree.nearest(tree.root, wanted, limit, "")
        assert num_tokens == max(lengths.values(), default=0)
        assert num_tokens == 0 or lengths[block] == num_tokens


def test_salts_and_sequences_that_share_nothing_copy_nothing() -> None:
    cache, copies = copying_cache(8, 4)
    compute(cache, [1, 2, 3, 4], salt="a")
    assert started(cache, [1, 2, 3, 9, 9], "b").num_computed_tokens == 0
    assert started(cache, [1, 2, 3, 9, 9], "a", shares=False).num_computed_tokens == 0
    assert started(cache, [2, 2, 3, 9, 9], "a").num_computed_tokens == 0
    assert copies == []


def test_a_source_that_the_reservation_evicts_is_copied_all_the_same() -> None:
    cache, copies = copying_cache(2, 4)
    cache.release(compute(cache, [1, 2, 3, 4]))
    seq = started(cache, [1, 2, 9, 4, 5])
    assert cache.groups[0].num_cached == 0, "the block was needed"
    assert copies == [(copies[0][0], seq.groups[0].block_table[0], 2)]
    cache.check([seq])


def test_lookup_cost_does_not_depend_on_the_number_of_siblings() -> None:
    costs = []
    for num_beside in (4, 4000):
        cache, _ = copying_cache(num_beside + 2, 4)
        for first in range(num_beside):
            cache.release(compute(cache, [1, first + 10, 3, 4]))
        seq = make_sequence([1, 11, 3, 5, 6])
        ends = cache.match(seq)
        costs.append(count_lines(lambda cache=cache, seq=seq, ends=ends: cache.start(seq, ends, True, 1)))  # type: ignore[misc]
        assert seq.num_computed_tokens == 3
    assert costs[0] == costs[1]


def test_truncate_frees_complete_blocks_only() -> None:
    cache = KVCache(8, 4)
    seq = make_sequence(list(range(20)))
    cache.reserve(seq, 15)
    fill(cache, seq, 15)
    table, version = list(seq.groups[0].block_table), seq.groups[0].table_version
    cache.truncate(seq, 13)
    assert (seq.groups[0].block_table, seq.groups[0].table_version, seq.num_computed_tokens) == (table, version, 13)
    cache.truncate(seq, 8)
    assert seq.groups[0].block_table == table[:2]
    assert seq.groups[0].table_version > version, "an entry may come back as another block"
    assert (cache.groups[0].num_free, cache.num_empty_slots) == (6, 0)
    cache.check([seq])
    cache.truncate(seq, 0)
    assert (seq.groups[0].block_table, cache.groups[0].num_used) == ([], 0)
    cache.check([seq])


def test_what_is_published_cannot_be_taken_back() -> None:
    cache = KVCache(8, 4)
    seq = compute(cache, list(range(9)))
    cache.truncate(seq, 8)
    cache.check([seq])
    with pytest.raises(AssertionError):
        cache.truncate(seq, 7)


@pytest.mark.slow
@search_again(1)
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_any_mixture_of_verbs_keeps_the_books(run: int, data: st.DataObject) -> None:
    """Sequences start, grow, publish, are taken back to any length, and end."""
    block_size = data.draw(st.sampled_from([1, 2, 4]))
    cache, copies = copying_cache(24, block_size)
    live: list[Sequence] = []
    for _ in range(data.draw(st.integers(1, 40))):
        verb = data.draw(st.sampled_from(["start", "grow", "publish", "truncate", "release"]))
        if verb == "start":
            seq = make_sequence(data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=12)))
            ends = cache.match(seq)
            if cache.admits(seq, ends, 1):
                cache.start(seq, ends, data.draw(st.booleans()), 1)
                live.append(seq)
            continue
        if not live:
            continue
        seq = data.draw(st.sampled_from(live))
        if verb == "grow" and cache.reserve(seq, len(seq.tokens)):
            fill(cache, seq, data.draw(st.integers(seq.num_computed_tokens, len(seq.tokens))))
        elif verb == "publish":
            cache.publish(seq, seq.num_computed_tokens)
        elif verb == "truncate":
            least = 0 if seq.groups[0].published is None else seq.groups[0].published.depth * block_size
            num_tokens = data.draw(st.integers(least, seq.num_computed_tokens))
            cache.truncate(seq, num_tokens)
            assert len(seq.groups[0].block_table) == cache.groups[0].blocks_for(num_tokens)
        elif verb == "release":
            cache.release(seq)
            live.remove(seq)
        cache.check(live)
    assert all(0 < num_tokens < block_size for _, _, num_tokens in copies)
    for seq in live:
        cache.release(seq)
    cache.check([])
    assert cache.groups[0].num_used == 0
