"""Sequences that belong to ranks: where they are placed, whom they preempt, and what is told of their blocks."""

from __future__ import annotations

from octavo.cache.kv_cache import KVCache
from octavo.cache.kv_events import KVEvents, Removed, Stored
from octavo.engine.engine import Engine
from octavo.engine.scheduler import Scheduler
from octavo.telemetry.cache_view import FREE
from tests.engine.making import make_request, run_to_end
from tests.oracle import OracleRunner


def make_engine(num_blocks: int, num_ranks: int, events: KVEvents | None = None) -> Engine:
    """So many blocks of four tokens on each rank."""
    cache = KVCache(num_blocks, 4, num_ranks=num_ranks, events=events)
    return Engine(Scheduler(cache, max_num_seqs=8, max_num_batched_tokens=64), OracleRunner(4))


def ranks(engine: Engine) -> dict[int, int]:
    """The rank of each running sequence, by id."""
    return {seq.id: seq.dp_rank for seq in engine.scheduler.running.values()}


def test_the_view_of_the_cache_has_the_blocks_of_all_ranks() -> None:
    engine = make_engine(num_blocks=6, num_ranks=2)
    for number in (7, 8):
        engine.add(make_request(number, prompt=9, max_tokens=12))
    engine.step()
    view = engine.cache_view()
    assert view.owners == [7, 3, FREE, 3, 8, 3, FREE, 3], "each number, and how often it follows"
    assert [(prefix.blocks, prefix.held) for prefix in view.prefixes] == [(2, 2), (2, 2)]
    run_to_end(engine)
    view = engine.cache_view()
    assert sum(prefix.blocks for prefix in view.prefixes) == engine.stats().num_cached_blocks == 10
    assert not any(prefix.held for prefix in view.prefixes)


def test_sequences_without_a_common_prefix_are_spread() -> None:
    engine = make_engine(num_blocks=16, num_ranks=3)
    for number in range(6):
        engine.add(make_request(number, prompt=8, max_tokens=20))
    engine.step()
    assert ranks(engine) == {0: 0, 1: 1, 2: 2, 3: 0, 4: 1, 5: 2}
    blocks = [seq.groups[0].block_table[0] // 16 for seq in engine.scheduler.running.values()]
    assert blocks == [*range(3), *range(3)]
    run_to_end(engine)


def test_a_prefix_is_found_on_the_rank_that_has_it_while_others_have_not_much_less_to_do() -> None:
    engine, shared = make_engine(num_blocks=32, num_ranks=2), list(range(16))
    engine.add(make_request(0, prompt=[500, *range(40)], max_tokens=40))
    engine.step()
    engine.add(make_request(1, prompt=[*shared, 90], max_tokens=40))
    engine.step()
    assert ranks(engine) == {0: 0, 1: 1}, "the one with less to attend to"
    for number in (2, 3, 4, 5):
        engine.add(make_request(number, prompt=[*shared, 90 + number], max_tokens=40))
        engine.step()
    found = {seq.id: seq.num_cached_tokens for seq in engine.scheduler.running.values()}
    assert ranks(engine) == {0: 0, 1: 1, 2: 1, 3: 1, 4: 1, 5: 0}
    assert found == {0: 0, 1: 0, 2: 16, 3: 16, 4: 16, 5: 0}, "the last is computed again elsewhere"
    run_to_end(engine)


def test_a_rank_without_room_is_passed_over() -> None:
    engine = make_engine(num_blocks=8, num_ranks=2)
    engine.add(make_request(0, prompt=26, max_tokens=6))
    engine.step()
    engine.add(make_request(1, prompt=9, max_tokens=20))
    engine.step()
    engine.add(make_request(2, prompt=9, max_tokens=3))
    engine.step()
    assert ranks(engine) == {0: 0, 1: 1, 2: 1}
    run_to_end(engine)


def test_only_sequences_of_the_same_rank_are_preempted() -> None:
    """The oldest needs a block on the first rank; the youngest, on the second, could give it none."""
    engine, shared = make_engine(num_blocks=7, num_ranks=2), list(range(12))
    prompts = [shared, [100, 101, 102, 103], [*shared[:8], 99], [200, 201, 202]]
    for number, prompt in enumerate(prompts):
        engine.add(make_request(number, prompt=prompt, max_tokens=15))
        engine.step()
    assert ranks(engine) == {0: 0, 1: 1, 2: 0, 3: 1}
    while not engine.stats().num_preemptions:
        engine.step()
        engine.check()
    assert ranks(engine) == {0: 0, 1: 1, 3: 1}
    run_to_end(engine)


def test_a_block_on_several_ranks_is_told_of_once() -> None:
    events = KVEvents()
    engine = make_engine(num_blocks=8, num_ranks=2, events=events)
    cache = engine.scheduler.cache
    for rank in (0, 1):
        seq = engine.scheduler.add(make_request(rank, prompt=list(range(9)), max_tokens=1))
        cache.place(seq, rank)
        cache.start(seq, cache.match(seq), True, 64)
        cache.note_filled(9)
        seq.num_computed_tokens = 9
        cache.publish(seq, 9)
        cache.release(seq)
    assert [type(event) for event in events.take()] == [Stored] * 2
    cache.ranks[1][0].evict(2)
    assert events.take() == []
    cache.ranks[0][0].evict(1)
    assert [type(event) for event in events.take()] == [Removed]
    cache.check([])


def test_a_session_forgets_its_blocks_on_every_rank() -> None:
    engine = make_engine(num_blocks=8, num_ranks=2)
    cache = engine.scheduler.cache
    for number in (0, 1):
        engine.add(make_request(number, prompt=9, max_tokens=3, session="s"))
    engine.step()
    assert ranks(engine) == {0: 0, 1: 1}
    run_to_end(engine)
    assert [groups[0].num_cached for groups in cache.ranks] == [2, 2]
    cache.forget_session("", "s")
    assert [groups[0].num_cached for groups in cache.ranks] == [0, 0]
    engine.check()
