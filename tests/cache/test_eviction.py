"""What is given up first, under each policy and whatever is kept."""

from __future__ import annotations

import gc
import math
import random

import pytest

from octavo.cache.eviction import POLICIES
from octavo.cache.kv_cache import KVCache
from octavo.cache.kv_events import KVEvent, KVEvents, Removed, Stored, chain_hash
from octavo.cache.node import Node
from octavo.config import CacheSettings, EngineConfig, settings
from octavo.errors import ConfigError
from octavo.sampling_params import SamplingParams
from octavo.types import Request, Sequence
from tests.engine.making import make_engine, make_request, run_to_end, serve, tokens_of


class Clock:
    def __init__(self) -> None:
        self.now = 10.0

    def __call__(self) -> float:
        return self.now


def run_through(
    cache: KVCache, tokens: list[int], ttl: float = 0.0, session: str = "", owner: str = "", number: int = 0
) -> list[int]:
    """Compute a sequence to its end, and give it back. Returns its blocks."""
    request = Request(number, tokens, SamplingParams(), 1, cache_ttl=ttl, session=session, owner=owner)
    seq = Sequence(request, order=(0,))
    cache.adopt(seq, cache.match(seq))
    assert cache.reserve(seq, len(tokens))
    cache.num_filled += len(tokens) - seq.num_computed_tokens
    seq.num_computed_tokens = len(tokens)
    cache.publish(seq, len(tokens))
    blocks = list(seq.groups[0].block_table)
    cache.release(seq)
    return blocks


def evicted(cache: KVCache, count: int) -> list[int]:
    """The next blocks to be given up."""
    before = len(cache.groups[0].pool.free_blocks)
    cache.groups[0].evict(count)
    return cache.groups[0].pool.free_blocks[before:]


def test_every_policy_can_be_chosen() -> None:
    (choices,) = [item.choices for item in settings(EngineConfig) if item.name == "eviction_policy"]
    assert set(choices) == set(POLICIES)
    assert CacheSettings().eviction_policy == "lru"


@pytest.mark.parametrize(
    ("policy", "order"),
    [
        # 1 is cached first, then 2 and 3; 1 is used twice more, and 2 once.
        ("lru", [3, 1, 2]),
        ("fifo", [3, 1, 2]),  # those with a child cannot go before it
        ("lfu", [3, 2, 1]),
        ("slru", [3, 1, 2]),
        ("session", [3, 1, 2]),
    ],
)
def test_orders(policy: str, order: list[int]) -> None:
    cache = KVCache(8, 1, eviction=policy)
    blocks = {run_through(cache, [first])[0]: first for first in (1, 2, 3)}
    for first in (1, 1, 2):
        run_through(cache, [first, 99])
    for block in cache.groups[0].tree.node_of.copy():
        if cache.groups[0].tree.node_of[block].edge[-1] == 99:
            assert block not in blocks
    gone = [blocks[block] for block in evicted(cache, 5) if block in blocks]
    assert gone == order
    cache.check([])


@pytest.mark.parametrize("policy", POLICIES)
def test_a_leaf_with_the_smallest_key_goes_first(policy: str) -> None:
    """Against a model that searches all leaves."""
    rng, clock = random.Random(policy), Clock()
    cache = KVCache(60, 1, eviction=policy, clock=clock)

    def rank(node: Node) -> tuple[float, ...]:
        return (node.kept_until > clock.now, *POLICIES[policy](node))

    for _ in range(400):
        clock.now += rng.random()
        tokens = [rng.randrange(3) for _ in range(rng.randrange(1, 9))]
        run_through(cache, tokens, rng.choice([0, 0, 0, 3.0, math.inf]), rng.choice(["", "a", "b"]))
        if cache.groups[0].num_cached > 45:
            for _ in range(rng.randrange(20)):
                leaves = {node.block: node for node in cache.groups[0].tree.walk() if not node.children}
                (block,) = evicted(cache, 1)
                assert rank(leaves[block]) == min(map(rank, leaves.values()))
        cache.check([])


def test_first_in_first_out_does_not_care_for_use() -> None:
    for policy, order in (("lru", [2, 3, 1]), ("fifo", [1, 2, 3])):
        cache = KVCache(8, 1, eviction=policy)
        blocks = {run_through(cache, [first])[0]: first for first in (1, 2, 3)}
        run_through(cache, [1])
        assert [blocks[block] for block in evicted(cache, 3)] == order


def test_a_scan_does_not_evict_reused_blocks() -> None:
    kept = {}
    for policy in ("lru", "slru"):
        cache = KVCache(20, 1, eviction=policy)
        for _ in range(2):
            run_through(cache, [*range(5), 99])
        for number in range(100, 130):
            run_through(cache, [number, number, number])
        kept[policy] = run_through(cache, [*range(5), 99]) and cache.groups[0].tree.num_born
    assert kept["slru"] < kept["lru"], "less was computed again"


def test_under_slru_a_share_of_the_pool_stays_with_the_new() -> None:
    """Though all blocks were used again, two of ten lost their rank: they go before what came after them."""
    cache = KVCache(10, 1, eviction="slru")
    for number in range(10):
        run_through(cache, [number])
        run_through(cache, [number, 99])
        cache.check([])
    assert cache.groups[0].num_free == 0
    run_through(cache, [50])
    run_through(cache, [51])
    assert {50, 51} <= {node.edge[1] for node in cache.groups[0].tree.root.children.values()}


def test_under_slru_a_path_that_is_too_long_loses_its_end_first() -> None:
    """Eight of ten blocks can have the rank, and nine were used again."""
    cache = KVCache(10, 1, eviction="slru")
    for _ in range(2):
        path = run_through(cache, [*range(10)])
    (other,) = run_through(cache, [99])  # for which the last goes, which was computed again
    assert evicted(cache, 3) == [path[8], other, path[7]]


def test_blocks_that_a_conversation_abandoned_are_evicted_first() -> None:
    cache = KVCache(20, 1, eviction="session")
    other = run_through(cache, [7, 8])
    first = run_through(cache, [1, 2, 50, 51], session="s")
    second = run_through(cache, [1, 2, 3, 4], session="s")
    assert second[:2] == first[:2]
    assert evicted(cache, 3) == [first[3], first[2], other[1]]
    run_through(cache, [1, 2, 3, 4], session="t")
    run_through(cache, [9, 9], session="s")
    assert set(evicted(cache, 2)).isdisjoint(second) is False, "another conversation is not asked"
    cache.check([])


def test_a_turn_that_goes_back_to_an_earlier_place_keeps_what_leads_there() -> None:
    cache = KVCache(20, 1, eviction="session")
    (other,) = run_through(cache, [8])
    first = run_through(cache, [1, 2, 50], session="s")
    run_through(cache, [1, 2], session="s")
    assert evicted(cache, 2) == [first[2], other]


def test_a_superseded_turn_that_is_asked_for_again_counts_again() -> None:
    cache = KVCache(20, 1, eviction="session")
    first = run_through(cache, [1, 50], session="s")
    run_through(cache, [1, 2], session="s")
    other = run_through(cache, [8])
    run_through(cache, [1, 50, 60])
    assert evicted(cache, 1) != [first[1]]
    assert first[1] in cache.groups[0].tree.node_of
    assert other


@pytest.mark.parametrize("policy", POLICIES)
def test_kept_blocks_go_last_until_their_time_is_over(policy: str) -> None:
    clock = Clock()
    cache = KVCache(8, 1, eviction=policy, clock=clock)
    pinned = run_through(cache, [1, 2], ttl=math.inf)
    kept = run_through(cache, [3, 4], ttl=5.0)
    plain = run_through(cache, [5, 6])
    clock.now += 1
    assert evicted(cache, 2) == [plain[1], plain[0]]
    plain = run_through(cache, [5, 6])
    clock.now += 5
    assert set(evicted(cache, 2)) != set(plain) or policy in ("lfu",)
    assert set(evicted(cache, 2)) <= {*kept, *plain}
    assert evicted(cache, 2) == [pinned[1], pinned[0]], "what is pinned goes too, when there is nothing else"
    cache.check([])


def test_hints_do_not_pile_up() -> None:
    cache = KVCache(8, 1, eviction="session", clock=Clock())
    for _ in range(1000):
        run_through(cache, [1, 2, 3], ttl=1000.0, session="s")
    assert len(cache.groups[0].tree.pinned._expiring) < 50
    for number in range(1000):
        run_through(cache, [1, 2], session=f"s{number}")
    assert len(cache.sessions) == 8


def test_an_owner_has_an_equal_share_of_the_pins_whatever_others_pin() -> None:
    for seed in range(30):
        rng = random.Random(seed)
        cache = KVCache(rng.randrange(2, 80), 1, clock=Clock())
        group, pinned = cache.groups[0], cache.groups[0].tree.pinned
        assert pinned.most == cache.num_blocks // 2
        for _ in range(60):
            before, num_evicted = pinned.counts(), group.num_evicted
            tokens = [rng.randrange(3) for _ in range(rng.randrange(1, min(20, cache.num_blocks) + 1))]
            run_through(cache, tokens, rng.choice([0.0, 60.0, math.inf]), owner=rng.choice("aaaaaabc"))
            cache.check([])
            after = pinned.counts()
            assert sum(after.values()) == group.num_pinned <= pinned.most
            if group.num_evicted == num_evicted:
                share = pinned.most // max(1, len({*before, *after}))
                assert all(after.get(owner, 0) >= min(count, share) for owner, count in before.items())


def test_pins_end_at_their_times_in_any_order() -> None:
    """Each time is that of the pin that lasts longest, also where another owner had set an earlier one."""
    for seed in range(20):
        rng, clock = random.Random(seed), Clock()
        cache = KVCache(200, 1, clock=clock)
        until: dict[int, float] = {}
        for _ in range(40):
            ttl = rng.choice([1.0, 4.0, 9.0, math.inf]) if rng.random() < 0.7 else 0.0
            blocks = run_through(cache, [rng.randrange(2) for _ in range(6)], ttl, owner=rng.choice("ab"))
            if ttl:
                until |= {block: max(until.get(block, 0.0), clock.now + ttl) for block in blocks}
            clock.now += rng.random() * 3
            until = {block: end for block, end in until.items() if end > clock.now}
            assert cache.groups[0].num_pinned == len(until)
            cache.check([])


def test_pins_of_a_flood_take_neither_pins_nor_room_of_others() -> None:
    engine, _ = make_engine(num_blocks=40, block_size=2)
    quiet = make_request(1, prompt=18, cache_ttl=math.inf, owner="quiet")
    serve(engine, [quiet])
    for number in range(2, 60):
        serve(engine, [make_request(number, prompt=30, cache_ttl=math.inf, owner="flood")])
        assert set(engine.scheduler.cache.groups[0].tree.pinned.counts().values()) <= {10, 9, 11}
    again = serve(engine, [make_request(98, quiet.prompt_tokens, owner="quiet")])
    assert again[98][-1].num_cached_tokens == 16
    whole = serve(engine, [make_request(99, prompt=76, owner="other")])
    assert len(tokens_of(whole[99])) == 4
    assert engine.stats().num_preemptions == 0


def test_what_a_session_has_is_shown() -> None:
    clock = Clock()
    cache = KVCache(16, 1, clock=clock)
    run_through(cache, [1, 2, 3], session="s", owner="a", number=1, ttl=60.0)
    run_through(cache, [1, 2, 3, 4, 5], session="s", owner="a", number=2)
    run_through(cache, [7], session="s", owner="b", number=3)
    clock.now += 2
    [seen] = cache.sessions.views("a", 10)
    assert (seen.id, seen.owner, seen.requests, seen.tokens) == ("s", "a", 2, 5)
    assert (seen.cached_tokens, seen.pinned_tokens, seen.idle_seconds, seen.pinned_seconds) == (5, 3, 2.0, 58.0)
    evicted(cache, 3)
    run_through(cache, [1, 2, 3, 4], session="t", owner="a", number=4, ttl=60.0)
    views = cache.sessions.views(None, 10)
    assert [(view.owner, view.id, view.cached_tokens, view.pinned_tokens) for view in views] == [
        ("a", "t", 4, 4),
        ("a", "s", 3, 3),
        ("b", "s", 0, 0),
    ]
    assert cache.sessions.views(None, 2) == views[:2]
    for number in range(20):
        run_through(cache, [9], session=f"x{number}", owner="c")
    assert len(cache.sessions.views("c", 100)) == 13, "an owner with more loses its oldest first"
    assert len(cache.sessions.views(None, 100)) == 16


def test_helpers_with_the_name_of_a_session_leave_it_as_it_is() -> None:
    """Each goes on from its own last turn, also where the main conversation was evicted in between."""
    cache = KVCache(64, 1, eviction="session")
    main = [*range(100, 110)]
    run_through(cache, main, session="s", number=0)
    for number in range(1, 10):
        helper = [100, 101, *[number % 3] * number]  # of four, the first three begin alike
        run_through(cache, helper, session="s", number=number)
        assert not [node for node in cache.groups[0].tree.walk() if node.is_superseded and node.edge[-1] in main]
        [session] = cache.sessions.find("", "s")
        assert len(session.turns) <= 4
        assert len({turn.slot for turn in session.turns}) == len(session.turns)
    run_through(cache, [*main, 1, 2], session="s", number=10)
    [session] = cache.sessions.find("", "s")
    assert session.turns[0].num_blocks == 12
    slot = session.turns[0].slot
    cache.clear()
    run_through(cache, [*main, 1, 2, 3], session="s", number=11)
    [session] = cache.sessions.find("", "s")
    assert session.turns[0].slot == slot, "though nothing was left of it, it is as long"
    cache.forget_session("", "s")
    assert cache.groups[0].num_cached == 0
    cache.check([])


def test_sessions_keep_no_blocks_that_were_evicted() -> None:
    """Their number is that of the blocks, and each was as long as the cache."""
    cache = KVCache(32, 1)
    for number in range(40):
        run_through(cache, [number, *range(31)], session=f"s{number}")
    gc.collect()
    tree = cache.groups[0].tree
    alive = [one for one in gc.get_objects() if isinstance(one, Node) and one.above(0) is tree.root]
    assert len(cache.sessions) == 32
    assert len(alive) == 1 + 32
    ends = [end for number in range(40) for one in cache.sessions.find("", f"s{number}") for end in one.turns[0].ends]
    assert len(ends) == 32
    assert {*ends} == {tree.root, *(node for node in alive if node.depth == 32)}


def test_a_session_of_which_the_end_was_evicted_is_forgotten_too() -> None:
    cache = KVCache(8, 1)
    run_through(cache, [1, 2, 3], session="s")
    evicted(cache, 1)
    cache.forget_session("", "s")
    assert cache.groups[0].num_cached == 0
    cache.check([])


def test_a_session_is_forgotten_but_for_what_others_use() -> None:
    cache = KVCache(16, 1)
    there = cache.groups[0].tree.node_of
    run_through(cache, [1, 2, 3, 4], session="a", ttl=math.inf)
    run_through(cache, [1, 2, 5, 6], session="b")
    held = Sequence(Request(0, [1, 2, 3, 9], SamplingParams(), 1), order=(0,))
    cache.adopt(held, cache.match(held))
    cache.forget_session("", "unknown")
    cache.forget_session("somebody else", "a")
    assert len(there) == 6
    cache.forget_session("", "a")
    assert {node.edge[-1] for node in there.values()} == {1, 2, 3, 5, 6}, "a sequence holds three"
    cache.check([held])
    cache.release(held)
    cache.forget_session("", "b")
    assert {node.edge[-1] for node in there.values()} == {1, 2, 3}
    cache.check([])


@pytest.mark.parametrize("other", [{}, {"session": "b"}, {"session": "a", "owner": "x"}])
def test_forgetting_a_session_leaves_prompts_that_end_on_its_path(other: dict[str, str]) -> None:
    cache = KVCache(16, 1)
    there = cache.groups[0].tree.node_of
    for tokens in ([1], [1, 2, 3, 4], [1, 2, 3, 4, 5]):
        run_through(cache, tokens, session="a")
    run_through(cache, [1, 2, 3], **other)
    cache.forget_session("", "a")
    assert {node.edge[-1] for node in there.values()} == {1, 2, 3}
    cache.check([])


def test_admission_leaves_the_watermark_to_running_sequences() -> None:
    cache = KVCache(10, 1, watermark=0.4)
    root = cache.groups[0].tree.root
    assert cache.groups[0].fits(root, 10), "alone, a sequence may have everything"
    assert cache.groups[0].fits(root, 6, num_spare=1)
    assert not cache.groups[0].fits(root, 7, num_spare=1)
    assert not cache.groups[0].fits(root, 5, num_spare=6)


def test_empty_slots_are_those_at_the_ends_of_tables() -> None:
    engine, _ = make_engine(block_size=4)
    for number, prompt in enumerate((5, 8, 3)):
        engine.add(make_request(number, prompt=prompt, max_tokens=9))
    while engine.has_work:
        engine.step()
        expected = sum(
            len(seq.groups[0].block_table) * 4 - seq.num_computed_tokens for seq in engine.scheduler.running.values()
        )
        assert engine.stats().num_empty_slots == expected
    assert engine.stats().num_empty_slots == 0


class Router:
    """Knows what is cached from events alone."""

    def __init__(self) -> None:
        self.known: dict[int, Stored] = {}
        self.last = 0

    def hear(self, events: list[KVEvent]) -> None:
        for event in events:
            assert event.number == self.last + 1
            self.last = event.number
            if isinstance(event, Removed):
                del self.known[event.hash]
            else:
                assert event.parent == 0 or event.parent in self.known
                assert event.hash == chain_hash(event.parent, event.tokens, event.salt)
                self.known[event.hash] = event

    def match(self, tokens: list[int], block_size: int, salt: str) -> int:
        """How many blocks of a prompt are cached."""
        parent, count = 0, 0
        for start in range(0, len(tokens) - block_size + 1, block_size):
            parent = chain_hash(parent, tokens[start : start + block_size], "" if start else salt)
            if parent not in self.known:
                break
            count += 1
        return count


def test_a_router_knows_from_events_what_is_cached() -> None:
    rng, events, router = random.Random(4), KVEvents(), Router()
    cache = KVCache(30, 2, events=events)
    for _ in range(300):
        salt = rng.choice(["", "x"])
        tokens = [rng.randrange(3) for _ in range(rng.randrange(2, 14))]
        seq = Sequence(Request(0, tokens, SamplingParams(), 1, cache_salt=salt), order=(0,))
        router.hear(events.take())
        assert router.match(tokens[: len(tokens) - 1], 2, salt) == cache.match(seq)[0].depth
        cache.adopt(seq, cache.match(seq))
        cache.reserve(seq, len(tokens))
        cache.num_filled += len(tokens) - seq.num_computed_tokens
        seq.num_computed_tokens = len(tokens)
        cache.publish(seq, len(tokens))
        cache.release(seq)
    router.hear(events.take())
    assert set(router.known) == {node.hash for node in cache.groups[0].tree.walk()}


@pytest.mark.parametrize(
    "flat",
    [
        {"eviction_policy": "lfu", "enable_prefix_caching": False},
        {"enable_kv_events": True, "enable_prefix_caching": False},
        {"kv_watermark": 1.0},
        {"kv_watermark": -0.1},
        {"eviction_policy": "random"},
    ],
)
def test_settings_that_cannot_work_are_refused(flat: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        EngineConfig.from_flat(flat)


def test_pins_and_turns_through_the_engine() -> None:
    engine, _ = make_engine(num_blocks=16, block_size=2)
    pinned = make_request(0, prompt=8, cache_ttl=math.inf, session="s")
    engine.add(pinned)
    run_to_end(engine)
    for number in range(1, 20):
        engine.add(make_request(number, prompt=12))
        run_to_end(engine)
    again = make_request(99, prompt=pinned.prompt_tokens)
    outputs = (engine.add(again), run_to_end(engine))[1]
    assert outputs[99][-1].num_cached_tokens == 6
