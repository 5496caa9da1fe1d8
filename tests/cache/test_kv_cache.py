"""Each verb of the KV cache, and what they cost."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from octavo.cache.kv_cache import KVCache
from octavo.sampling_params import SamplingParams
from octavo.types import Request, Sequence
from tests.operations import count_lines


def make_sequence(tokens: list[int], salt: str = "") -> Sequence:
    return Sequence(
        Request(id=0, prompt_tokens=tokens, params=SamplingParams(), max_tokens=1, cache_salt=salt), order=(0,)
    )


def found(cache: KVCache, tokens: list[int], salt: str = "") -> list[int]:
    """The blocks that a sequence of ``tokens`` could start with."""
    return cache.match(make_sequence(tokens, salt))[0].path()


def fill(cache: KVCache, seq: Sequence, num_tokens: int) -> None:
    """Compute positions up to ``num_tokens``, the way the scheduler counts it."""
    cache.note_filled(num_tokens - seq.num_computed_tokens)
    seq.num_computed_tokens = num_tokens


def compute(cache: KVCache, tokens: list[int], salt: str = "") -> Sequence:
    """A sequence with all its tokens computed and published, the way the scheduler does it."""
    seq = make_sequence(tokens, salt)
    cache.adopt(seq, cache.match(seq))
    assert cache.reserve(seq, len(tokens))
    fill(cache, seq, len(tokens))
    cache.publish(seq, len(tokens))
    return seq


def test_match_leaves_a_token_to_compute() -> None:
    cache = KVCache(8, 2)
    seq = compute(cache, [1, 2, 3, 4])
    assert found(cache, [1, 2, 3, 4]) == seq.groups[0].block_table[:1]
    assert found(cache, [1, 2, 3, 4, 5]) == seq.groups[0].block_table
    assert found(cache, [1]) == []


def test_adopt_shares_blocks_in_use_and_wakes_idle_ones() -> None:
    cache = KVCache(8, 2)
    first = compute(cache, [1, 2, 3, 4])
    second = make_sequence([1, 2, 3, 4, 5])
    cache.adopt(second, cache.match(second))
    assert second.groups[0].block_table == first.groups[0].block_table
    assert second.num_computed_tokens == 4
    cache.check([first, second])
    cache.release(first)
    cache.check([second])
    assert cache.groups[0].num_cached == 0
    cache.release(second)
    assert (cache.groups[0].num_cached, cache.groups[0].num_used) == (2, 0)
    third = make_sequence([1, 2, 3, 4, 5])
    cache.adopt(third, cache.match(third))
    assert (cache.groups[0].num_cached, cache.groups[0].num_used) == (0, 2)
    cache.check([third])


def test_reserve_covers_exactly_and_keeps_what_is_there() -> None:
    cache = KVCache(4, 4)
    seq = make_sequence([1])
    assert cache.reserve(seq, 1)
    assert len(seq.groups[0].block_table) == 1
    assert cache.reserve(seq, 4)
    assert len(seq.groups[0].block_table) == 1
    version, table = seq.groups[0].table_version, list(seq.groups[0].block_table)
    assert cache.reserve(seq, 5)
    assert seq.groups[0].block_table[:1] == table
    assert len(seq.groups[0].block_table) == 2
    assert seq.groups[0].table_version == version, "growing is not a change"


def test_reserve_says_no_and_changes_nothing() -> None:
    cache = KVCache(4, 1)
    cache.release(compute(cache, [1, 2]))
    seq = make_sequence([9])
    assert not cache.reserve(seq, 5)
    assert seq.groups[0].block_table == []
    assert (cache.groups[0].num_free, cache.groups[0].num_cached) == (2, 2)
    assert cache.reserve(seq, 4), "idle blocks are given up for a reservation"
    assert cache.groups[0].num_cached == 0
    cache.check([seq])


def test_fits_leaves_blocks_for_others() -> None:
    cache = KVCache(4, 1)
    assert not cache.groups[0].fits(cache.groups[0].tree.root, 3, num_spare=2)
    assert cache.groups[0].fits(cache.groups[0].tree.root, 3, num_spare=1)
    assert cache.groups[0].num_free == 4


def test_fits_does_not_count_the_idle_blocks_that_it_builds_on() -> None:
    cache = KVCache(6, 1)
    running = compute(cache, [1, 2])
    cache.release(compute(cache, [1, 2, 3, 4]))
    assert (cache.groups[0].num_free, cache.groups[0].num_cached) == (2, 2)
    seq = make_sequence([1, 2, 3, 4, 5, 6, 7])
    ends = cache.match(seq)
    node = ends[0]
    assert node.depth == 4
    assert not cache.groups[0].fits(node, 7)
    assert cache.groups[0].fits(node, 6)
    assert not cache.groups[0].fits(node, 6, num_spare=1)
    cache.adopt(seq, ends)
    assert cache.reserve(seq, 6)
    cache.check([running, seq])


def test_a_repeated_capacity_check_sees_blocks_freed_or_taken_since() -> None:
    """Against counting one by one, for one path that is held to ever other depths."""
    cache = KVCache(40, 1)
    cache.release(compute(cache, list(range(20))))
    nodes = {depth: cache.match(make_sequence([*range(depth), 99]))[0] for depth in (0, 7, 20)}
    holders: dict[int, Sequence] = {}
    rng = random.Random(3)
    for _ in range(300):
        depth = rng.randrange(1, 21)
        if depth in holders:
            cache.release(holders.pop(depth))
        else:
            cache.adopt(holder := make_sequence([*range(20), 99]), cache.match(make_sequence([*range(depth), 99])))
            holders[depth] = holder
        asked, node = rng.choice(list(nodes.items()))
        num_idle = max(0, asked - max(holders, default=0))
        for _ in range(2):
            assert cache.groups[0].fits(node, 20 + asked - num_idle + cache.groups[0].num_cached)
            assert not cache.groups[0].fits(node, 21 + asked - num_idle + cache.groups[0].num_cached)
    cache.check(holders.values())


def test_asking_again_for_room_does_not_walk_the_path_again() -> None:
    cache = KVCache(3000, 1)
    cache.release(compute(cache, list(range(2900))))
    node = cache.match(make_sequence([*range(2900), 1]))[0]
    asked = 0

    class Refs(list[int]):
        def __getitem__(self, index: Any) -> Any:
            nonlocal asked
            asked += 1
            return super().__getitem__(index)

    cache.groups[0].pool.refs = Refs(cache.groups[0].pool.refs)
    assert not cache.groups[0].fits(node, 3001)
    assert asked >= 2900
    asked = 0
    assert not cache.groups[0].fits(node, 3001)
    assert asked <= 2


def test_a_repeated_match_looks_only_at_what_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = KVCache(80, 1)
    tokens = list(range(50))
    first = compute(cache, tokens[:40])
    seq = make_sequence([*tokens, 99])
    assert cache.match(seq)[0].path() == first.groups[0].block_table
    looked_at: list[int] = []
    edge = cache.groups[0].tree.edge

    def noted(tokens: list[int | None], index: int, salt: str) -> object:
        looked_at.append(index)
        return edge(tokens, index, salt)

    monkeypatch.setattr(cache.groups[0].tree, "edge", noted)
    assert cache.match(seq)[0].path() == first.groups[0].block_table
    assert looked_at == [40]
    longer = compute(cache, tokens)
    looked_at.clear()
    assert cache.match(seq)[0].path() == longer.groups[0].block_table
    assert looked_at == list(range(40, 50))
    blocks = list(longer.groups[0].block_table)
    for holder in (first, longer):
        cache.release(holder)
    cache.groups[0].evict(15)
    looked_at.clear()
    assert cache.match(seq)[0].path() == blocks[:35]
    assert looked_at == [35]
    cache.groups[0].evict(35)
    assert cache.match(seq) == cache.roots(seq)


def test_a_repeated_match_sees_a_block_that_was_evicted_and_computed_again() -> None:
    cache = KVCache(4, 1)
    cache.release(compute(cache, [1, 2]))
    seq = make_sequence([1, 2, 3])
    stale = cache.match(seq)[0]
    cache.groups[0].evict(2)
    filler = compute(cache, [9])
    again = compute(cache, [1, 2])
    assert cache.match(seq)[0].path() == again.groups[0].block_table
    assert cache.match(seq)[0] is not stale
    cache.check([filler, again])


def test_publish_needs_full_blocks() -> None:
    cache = KVCache(8, 4)
    seq = make_sequence(list(range(10)))
    cache.reserve(seq, 10)
    fill(cache, seq, 10)
    cache.publish(seq, 7)
    assert found(cache, [*range(10), 99]) == seq.groups[0].block_table[:1]
    cache.publish(seq, 8)
    assert found(cache, [*range(10), 99]) == seq.groups[0].block_table[:2]


def test_publish_changes_over_to_the_block_cached_first() -> None:
    cache = KVCache(8, 2)
    tokens = [1, 2, 3, 4]
    first, second = make_sequence(tokens), make_sequence(tokens)
    for seq in (first, second):
        cache.reserve(seq, 4)
        fill(cache, seq, 4)
    assert not set(first.groups[0].block_table) & set(second.groups[0].block_table)
    cache.publish(first, 2)
    cache.publish(second, 4)
    cache.publish(first, 4)
    assert first.groups[0].block_table == second.groups[0].block_table
    assert (first.groups[0].table_version, second.groups[0].table_version) == (1, 1)
    assert cache.groups[0].num_used == 2
    assert cache.groups[0].num_free == 6
    cache.check([first, second])


def test_publish_is_incremental(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = KVCache(64, 1)
    looked_at: list[int] = []
    edge = cache.groups[0].tree.edge

    def noted(tokens: list[int | None], index: int, salt: str) -> object:
        looked_at.append(index)
        return edge(tokens, index, salt)

    monkeypatch.setattr(cache.groups[0].tree, "edge", noted)
    seq = make_sequence(list(range(50)))
    cache.reserve(seq, 50)
    fill(cache, seq, 50)
    for num_tokens in (10, 10, 11, 50):
        cache.publish(seq, num_tokens)
    assert looked_at == list(range(50))
    cache.release(seq)
    again = make_sequence(list(range(60)))
    cache.adopt(again, cache.match(again))
    looked_at.clear()
    cache.reserve(again, 60)
    fill(cache, again, 60)
    cache.publish(again, 60)
    assert looked_at == list(range(50, 60)), "what was adopted is published already"


def test_release_gives_everything_back() -> None:
    cache = KVCache(8, 2)
    seq = compute(cache, [1, 2, 3])
    version = seq.groups[0].table_version
    cache.release(seq)
    assert (seq.groups[0].block_table, seq.num_computed_tokens, seq.groups[0].published) == ([], 0, None)
    assert seq.groups[0].table_version > version
    assert (cache.groups[0].num_free, cache.groups[0].num_cached, cache.groups[0].num_used) == (7, 1, 0)


def test_no_prefix_is_shared_when_that_is_off() -> None:
    cache = KVCache(8, 2, enable_prefix_caching=False)
    cache.release(compute(cache, [1, 2, 3, 4]))
    assert found(cache, [1, 2, 3, 4, 5]) == []
    assert (cache.groups[0].num_free, cache.groups[0].num_cached) == (8, 0)


def test_salts_do_not_share() -> None:
    cache = KVCache(8, 2)
    seq = compute(cache, [1, 2, 3, 4], salt="a")
    assert found(cache, [1, 2, 3, 4, 5], "a") == seq.groups[0].block_table
    assert found(cache, [1, 2, 3, 4, 5]) == []


def test_evicts_the_least_recently_used_leaf_first() -> None:
    """Against a model that searches: the idle leaf released longest ago, deepest first within a release."""
    rng = random.Random(5)
    cache = KVCache(40, 1)
    clock = 0
    last_use: dict[int, int] = {}
    for _ in range(300):
        seq = compute(cache, [rng.randrange(3) for _ in range(rng.randrange(1, 8))])
        for block in reversed(seq.groups[0].block_table):
            clock += 1
            last_use[block] = clock
        cache.release(seq)
        if cache.groups[0].num_cached > 30:
            for _ in range(rng.randrange(8)):
                leaves = [node.block for node in cache.groups[0].tree.walk() if not node.children]
                expected = min(leaves, key=last_use.__getitem__)
                cache.groups[0].evict(1)
                assert expected in cache.groups[0].pool.free_blocks
        cache.check([])


def test_a_prefix_of_32k_tokens() -> None:
    cache = KVCache(40_000, 1)
    tokens = [t % 11 for t in range(32_768)]
    seq = compute(cache, tokens)
    other = compute(cache, [*tokens, 1, 2])
    assert other.groups[0].block_table[: len(tokens)] == seq.groups[0].block_table
    cache.release(seq)
    cache.release(other)
    cache.check([])
    hungry = make_sequence([99])
    assert cache.reserve(hungry, 39_000)
    cache.check([hungry])
    assert cache.groups[0].num_cached == 1_000


def verbs(cache: KVCache) -> dict[str, Callable[[], object]]:
    """One call of each verb, on sequences of the same size whatever the pool."""
    seq = make_sequence([5, 5, 5, 5])
    return {
        "match": lambda: cache.match(seq),
        "fits": lambda: cache.groups[0].fits(cache.match(seq)[0], 4),
        "adopt": lambda: cache.adopt(seq, cache.match(seq)),
        "reserve by evicting": lambda: cache.reserve(seq, 4),
        "publish": lambda: cache.publish(seq, 4),
        "release": lambda: cache.release(seq),
        "counts": lambda: (
            cache.groups[0].num_used,
            cache.groups[0].num_free,
            cache.groups[0].num_cached,
            cache.num_empty_slots,
        ),
    }


def pool_full_of_prefixes(num_blocks: int) -> KVCache:
    cache = KVCache(num_blocks, 1)
    for start in range(0, num_blocks, 8):
        cache.release(compute(cache, list(range(start + 10, start + 18))))
    assert cache.groups[0].num_free == 0
    return cache


def test_no_cost_grows_with_what_is_cached() -> None:
    costs = [
        {name: count_lines(call) for name, call in verbs(pool_full_of_prefixes(num_blocks)).items()}
        for num_blocks in (16, 16384)
    ]
    assert costs[0] == costs[1]


def test_no_cost_grows_with_the_pool() -> None:
    """From a thousand blocks to a million, of which most are free."""
    costs = []
    for num_blocks in (1_000, 1_000_000):
        cache = KVCache(num_blocks, 1)
        for start in range(0, 400, 8):
            cache.release(compute(cache, list(range(start + 10, start + 18))))
        seq = make_sequence(list(range(5_000, 5_300)))
        costs.append(
            {
                "start": count_lines(lambda cache=cache, seq=seq: cache.start(seq, cache.match(seq), True, 4)),  # type: ignore[misc]
                "reserve": count_lines(lambda cache=cache, seq=seq: cache.reserve(seq, 400)),  # type: ignore[misc]
                "truncate": count_lines(lambda cache=cache, seq=seq: cache.truncate(seq, 0)),  # type: ignore[misc]
                "evict": count_lines(lambda cache=cache: cache.groups[0].evict(20)),  # type: ignore[misc]
                **{name: count_lines(call) for name, call in verbs(cache).items()},
            }
        )
    assert costs[0] == costs[1]


@pytest.mark.parametrize(
    "harm",
    [
        lambda cache, seq: cache.groups[0].pool.share(seq.groups[0].block_table[0]),
        lambda cache, seq: cache.groups[0].pool.free_blocks.pop(),
        lambda cache, seq: cache.groups[0].pool.free_blocks.append(cache.groups[0].pool.free_blocks[0]),
        lambda cache, seq: cache.groups[0].pool.free_blocks.append(seq.groups[0].block_table[0]),
        lambda cache, seq: seq.groups[0].block_table.reverse(),
        lambda cache, seq: cache.groups[0].tree.root.children.clear(),
        lambda cache, seq: cache.groups[0].tree.node_of.pop(seq.groups[0].block_table[0]),
        lambda cache, seq: cache.groups[0].tree.rest(seq.groups[0].block_table[0]),
        lambda cache, seq: setattr(seq, "num_computed_tokens", 1),
    ],
)
def test_check_notices(harm: Callable[[KVCache, Sequence], object]) -> None:
    cache = KVCache(8, 2)
    seq = compute(cache, [1, 2, 3, 4])
    cache.check([seq])
    harm(cache, seq)
    with pytest.raises(AssertionError):
        cache.check([seq])
