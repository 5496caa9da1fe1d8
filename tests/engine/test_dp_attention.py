"""Sequences that belong to ranks: where they are placed, whom they preempt, and what is told of their blocks."""

from __future__ import annotations

from functools import partial

from octavo.cache.kv_cache import KVCache
from octavo.cache.kv_events import KVEvents, Removed, Stored
from octavo.config import SchedulerSettings
from octavo.engine.engine import Engine
from octavo.engine.scheduler import Scheduler
from octavo.telemetry.cache_view import FREE
from tests.engine.making import make_request, run_to_end
from tests.operations import count_lines
from tests.oracle import OracleRunner


def make_engine(num_blocks: int, num_ranks: int, events: KVEvents | None = None, block_size: int = 4) -> Engine:
    """So many blocks on each rank."""
    cache = KVCache(num_blocks, block_size, num_ranks=num_ranks, events=events)
    return Engine(Scheduler(cache, max_num_seqs=8, max_num_batched_tokens=96), OracleRunner(block_size))


def ranks(engine: Engine) -> dict[int, int]:
    """The rank of each running sequence, by id."""
    return {seq.id: seq.dp_rank for seq in engine.scheduler.running.values()}


def publish(engine: Engine, rank: int, tokens: list[int]) -> None:
    """Have the prefix cache of a rank hold the full blocks of these tokens."""
    cache, seq = engine.scheduler.cache, engine.scheduler.add(make_request(rank, prompt=tokens, max_tokens=1))
    engine.scheduler.waiting.remove(seq.id)
    seq.dp_rank = rank
    cache.start(seq, cache.match(seq), True, 64)
    cache.note_filled(len(tokens))
    seq.num_computed_tokens = len(tokens)
    cache.publish(seq, len(tokens))
    cache.release(seq)


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


def test_a_rank_short_of_blocks_holds_up_no_other() -> None:
    """The third has none behind it on its rank to preempt, and waits for the end of the first."""
    engine, shared = make_engine(num_blocks=10, num_ranks=2, block_size=16), list(range(65))
    prompts = [shared, [100, 101, 102], [*shared[:32], *range(200, 244)], [103, 104, 105]]
    for number, prompt in enumerate(prompts):
        engine.add(make_request(number, prompt=prompt, max_tokens=40))
        engine.step()
    assert ranks(engine) == {0: 0, 1: 1, 2: 0, 3: 1}
    running = engine.scheduler.running
    waited = 0
    while 0 in running:
        before = {seq.id: len(seq.tokens) for seq in running.values()}
        if waited == 1:
            engine.add(make_request(4, prompt=2, max_tokens=40))
        engine.step()
        engine.check()
        behind = {seq.id for seq in running.values() if len(seq.tokens) == before.get(seq.id)}
        assert behind <= {2}
        waited += bool(behind)
    assert waited > 4
    assert ranks(engine)[4] == 1, "the new one is admitted, where nothing waits"
    run_to_end(engine)


def test_the_longest_prefix_counts_on_whichever_rank_it_is() -> None:
    settings = SchedulerSettings(scheduling_policy="longest-prefix", policy_ageing=1e6)
    cache, prompt = KVCache(40, 4, num_ranks=2), list(range(33))
    scheduler = Scheduler(cache, max_num_seqs=2, max_num_batched_tokens=64, settings=settings)
    engine = Engine(scheduler, OracleRunner(4))
    for number, first in enumerate(([9] * 20, prompt)):
        engine.add(make_request(number, prompt=first, max_tokens=3))
        engine.step()
    assert ranks(engine) == {0: 0, 1: 1}
    for number, waiting in enumerate(([500], [*prompt, 1]), 2):
        engine.add(make_request(number, prompt=waiting, max_tokens=3))
    assert scheduler.waiting.first().id == 3
    run_to_end(engine)


def test_the_matches_on_all_ranks_are_remembered() -> None:
    counts = []
    for num_tokens in (80, 800):
        engine, tokens = make_engine(num_blocks=300, num_ranks=2), list(range(num_tokens))
        for rank in (0, 1):
            publish(engine, rank, tokens)
        seq = engine.scheduler.add(make_request(2, prompt=[*tokens, 1], max_tokens=3))
        engine.scheduler.match_if_it_fits(seq)
        counts.append(count_lines(partial(engine.scheduler.match_if_it_fits, seq)))
    assert counts[0] == counts[1]


def test_a_block_on_several_ranks_is_told_of_once() -> None:
    events = KVEvents()
    engine = make_engine(num_blocks=8, num_ranks=2, events=events)
    cache = engine.scheduler.cache
    for rank in (0, 1):
        publish(engine, rank, list(range(9)))
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
