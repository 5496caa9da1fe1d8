"""The rules of the scheduler, one by one."""

from __future__ import annotations

import time

import pytest

from octavo.cache.kv_cache import KVCache
from octavo.engine.engine import Engine
from octavo.engine.scheduler import Scheduler
from octavo.errors import ConfigError, ContextLengthExceeded, InvalidParameter
from octavo.sampling_params import SamplingParams
from tests.engine.making import make_engine, make_request, planned, run_to_end, tokens_of
from tests.operations import count_lines
from tests.oracle import OracleRunner, Trouble, expected_output


def test_a_long_prompt_is_computed_in_chunks() -> None:
    engine, runner = make_engine(max_num_batched_tokens=10)
    engine.add(make_request(0, prompt=25, max_tokens=2))
    outputs = run_to_end(engine)
    assert [len(plan[0].tokens) for plan in runner.plans] == [10, 10, 5, 1]
    assert [plan[0].samples for plan in runner.plans] == [False, False, True, True]
    assert len(outputs[0]) == 2, "a chunk that samples nothing is no news"


def test_a_chunk_leaves_a_token_for_each_sequence_behind_it() -> None:
    engine, runner = make_engine(max_num_batched_tokens=8, max_num_seqs=8, policy="priority")
    for request_id in range(4):
        engine.add(make_request(request_id, prompt=1, max_tokens=30, priority=1))
    engine.step()
    engine.add(make_request(9, prompt=40, max_tokens=1, priority=0))
    engine.step()
    for _ in range(5):
        engine.step()
        assert planned(runner) == {9: 4, 0: 1, 1: 1, 2: 1, 3: 1}, "first in order, yet nobody starves"


def test_all_sequences_advance_with_the_smallest_budget() -> None:
    engine, runner = make_engine(max_num_batched_tokens=4, max_num_seqs=4, num_blocks=64)
    for request_id in range(4):
        engine.add(make_request(request_id, prompt=6, max_tokens=8))
    while engine.scheduler.waiting:
        engine.step()
    for _ in range(4):
        engine.step()
        assert set(planned(runner)) == set(engine.scheduler.running) or len(engine.scheduler.running) < 4


def test_stages_compute_different_sequences_and_chunks_of_one_prompt_at_once() -> None:
    engine, runner = make_engine(max_num_batched_tokens=10, depth=3, num_stages=3)
    engine.add(make_request(9, prompt=30, max_tokens=1))
    engine.step()
    assert [len(plan[0].tokens) for plan in runner.plans] == [10, 10, 10]
    run_to_end(engine)
    for request_id in range(5):
        engine.add(make_request(request_id, prompt=2, max_tokens=30))
    for _ in range(4):
        engine.step()
    for _ in range(12):
        engine.step()
        in_flight = [{item.seq.id for item in plan} for plan in runner.plans[-3:]]
        assert sorted(map(len, in_flight)) == [1, 2, 2], "each stage has about as much to do"
        assert set.union(*in_flight) == set(range(5)), "every sequence is in one of the steps"
    run_to_end(engine)


def test_stages_go_on_with_a_short_request_beside_a_long_prompt() -> None:
    engine, _ = make_engine(max_num_batched_tokens=10, depth=2, num_stages=2)
    engine.add(make_request(0, prompt=230, max_tokens=1))
    engine.step()
    engine.add(make_request(1, prompt=6, max_tokens=10))
    steps = [number for number in range(22) for output in engine.step() if output.request_id == 1 and output.tokens]
    assert len(steps) == 10, f"its tokens came at {steps}"
    run_to_end(engine)


def test_no_sequence_is_overtaken_while_waiting_for_blocks() -> None:
    engine, runner = make_engine(num_blocks=4, block_size=4)
    engine.add(make_request(0, prompt=8, max_tokens=8))
    engine.add(make_request(1, prompt=12, max_tokens=1))
    engine.add(make_request(2, prompt=1, max_tokens=1))
    engine.step()
    assert set(planned(runner)) == {0}, "1 has no room, and 2 comes after it"


def test_a_prompt_that_has_to_wait_is_looked_up_once() -> None:
    costs = []
    for num_cached in (8, 200):
        engine, _ = make_engine(num_blocks=260, block_size=4, max_num_batched_tokens=1024)
        shared = [7] * (4 * num_cached)
        engine.add(make_request(0, prompt=shared, max_tokens=100))
        engine.add(make_request(1, prompt=4 * (239 - num_cached), max_tokens=9))
        engine.step()
        engine.add(make_request(2, prompt=[*shared, *range(100)], max_tokens=1))
        engine.step()
        costs.append(count_lines(engine.scheduler.schedule))
        assert engine.stats().num_waiting == 1
    assert costs[0] == costs[1]


def test_a_prompt_gets_all_its_blocks_when_it_is_admitted() -> None:
    engine, _ = make_engine(num_blocks=8, block_size=4, max_num_batched_tokens=8)
    engine.add(make_request(0, prompt=24, max_tokens=1))
    engine.add(make_request(1, prompt=12, max_tokens=1))
    engine.step()
    engine.step()
    assert engine.stats().num_used_blocks == 6
    assert engine.stats().num_waiting == 1


def test_admission_leaves_a_block_for_each_that_runs() -> None:
    engine, _ = make_engine(num_blocks=4, block_size=4)
    for request_id in range(3):
        engine.add(make_request(request_id, prompt=4, max_tokens=5))
    engine.step()
    assert set(engine.scheduler.running) == {0, 1}
    run_to_end(engine)
    assert engine.stats().num_preemptions == 0


def test_the_youngest_is_preempted_and_returns_first() -> None:
    engine, _ = make_engine(num_blocks=8, block_size=2, max_num_seqs=3)
    for request_id in range(3):
        engine.add(make_request(request_id, prompt=3, max_tokens=7))
    engine.add(make_request(3, prompt=1, max_tokens=1))
    preempted = []
    while engine.has_work:
        before = set(engine.scheduler.running)
        finished = {output.request_id for output in engine.step() if output.finish_reason}
        engine.check()
        gone = before - set(engine.scheduler.running) - finished
        assert not gone or min(gone) > max(before - gone, default=-1), "an older sequence was preempted"
        preempted += sorted(gone)
        assert 0 not in gone
    assert preempted[0] == 2
    assert engine.stats().num_preemptions == len(preempted)


def test_an_older_sequence_gets_blocks_though_all_are_in_flight() -> None:
    """The youngest decodes within its own block for long; the oldest must not wait until that is full."""
    engine, runner = make_engine(num_blocks=3, block_size=16, depth=2, max_num_seqs=2)
    engine.add(make_request(0, prompt=11, max_tokens=30))
    engine.add(make_request(1, prompt=16, max_tokens=14))
    waited = longest = 0
    while 0 in engine.scheduler.running or not runner.plans:
        engine.step()
        engine.check()
        waited = 0 if 0 in planned(runner) else waited + 1
        longest = max(longest, waited)
    assert engine.stats().num_preemptions == 1
    assert longest <= 2
    run_to_end(engine)


def test_a_lone_sequence_as_big_as_the_pool_finishes() -> None:
    engine, _ = make_engine(num_blocks=5, block_size=4)
    request = make_request(0, prompt=11, max_tokens=10)
    engine.add(request)
    assert tokens_of(run_to_end(engine)[0]) == expected_output(request)[0]


@pytest.mark.parametrize(
    ("request_", "error"),
    [
        (make_request(0, prompt=11, max_tokens=11), ContextLengthExceeded),
        (make_request(0, prompt=21, max_tokens=0), ContextLengthExceeded),
        (make_request(0, prompt=[], max_tokens=1), InvalidParameter),
        (make_request(0, prompt=3, max_tokens=2, output_tokens=[1, 2]), InvalidParameter),
    ],
)
def test_what_can_never_be_served_is_refused(request_: object, error: type[Exception]) -> None:
    engine, _ = make_engine(num_blocks=5, block_size=4)
    with pytest.raises(error):
        engine.add(request_)  # type: ignore[arg-type]
    assert not engine.has_work


def test_an_id_in_use_is_refused() -> None:
    engine, _ = make_engine()
    engine.add(make_request(0))
    with pytest.raises(InvalidParameter):
        engine.add(make_request(0))
    engine.step()
    with pytest.raises(InvalidParameter):
        engine.add(make_request(0))
    run_to_end(engine)
    engine.add(make_request(0))


def test_a_budget_below_one_token_each_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_num_batched_tokens"):
        Scheduler(KVCache(4, 4), max_num_seqs=8, max_num_batched_tokens=7)


def test_abort_while_waiting_is_immediate() -> None:
    engine, _ = make_engine(max_num_seqs=1)
    engine.add(make_request(0))
    engine.add(make_request(1))
    engine.step()
    engine.abort(1)
    assert engine.stats().num_waiting == 0
    assert set(run_to_end(engine)) == {0}


def test_abort_of_an_idle_sequence_frees_its_blocks_at_once() -> None:
    engine, _ = make_engine(prefix_caching=False)
    engine.add(make_request(0, prompt=9))
    engine.step()
    assert engine.stats().num_used_blocks
    engine.abort(0)
    assert engine.stats().num_used_blocks == 0
    assert not engine.has_work
    assert engine.step() == []


def test_abort_in_flight_frees_blocks_when_the_step_is_over() -> None:
    engine, _ = make_engine(depth=2, prefix_caching=False)
    engine.add(make_request(0, prompt=9, max_tokens=9))
    engine.step()
    engine.abort(0)
    engine.check()
    assert engine.stats().num_used_blocks, "a step in flight may still write there"
    assert engine.has_work
    assert engine.step() == []
    assert engine.stats().num_used_blocks == 0
    assert not engine.has_work


def test_abort_of_an_unknown_id_does_nothing() -> None:
    engine, _ = make_engine()
    engine.abort(5)
    engine.add(make_request(0))
    outputs = run_to_end(engine)
    engine.abort(0)
    assert outputs[0][-1].finish_reason == "length"


def test_a_prefix_is_computed_once() -> None:
    engine, runner = make_engine(block_size=4)
    first = make_request(0, prompt=10, max_tokens=5)
    engine.add(first)
    answer = tokens_of(run_to_end(engine)[0])
    engine.add(make_request(1, prompt=[*first.prompt_tokens, *answer, 3], max_tokens=1))
    before = time.monotonic()
    (output,) = run_to_end(engine)[1]
    assert output.num_cached_tokens == 12
    assert planned(runner) == {1: 4}
    assert before <= output.first_scheduled <= time.monotonic()
    stats = engine.stats()
    assert (stats.prefix_queries, stats.prefix_hits) == (26, 12)
    assert (stats.num_prompt_tokens, stats.num_output_tokens) == (14, 6)


def test_prompt_logprobs_need_the_entire_prompt() -> None:
    engine, runner = make_engine(block_size=4, max_num_batched_tokens=8)
    engine.add(make_request(0, prompt=[1] * 20, max_tokens=1))
    run_to_end(engine)
    params = SamplingParams(max_tokens=0, prompt_logprobs=0)
    engine.add(make_request(1, prompt=[1] * 20, max_tokens=0, params=params))
    outputs = run_to_end(engine)[1]
    assert [len(plan[0].tokens) for plan in runner.plans[-3:]] == [8, 8, 4]
    assert [(o.prompt_logprobs_start, len(o.prompt_logprobs or [])) for o in outputs] == [(1, 8), (9, 8), (17, 3)]
    assert [o.finish_reason for o in outputs] == [None, None, "length"]
    assert tokens_of(outputs) == []
    assert all(o.num_cached_tokens == 0 for o in outputs)


def test_a_replayed_request_goes_on_where_it_was() -> None:
    request = make_request(0, prompt=5, max_tokens=9)
    whole, _ = expected_output(request)
    engine, _ = make_engine()
    engine.add(make_request(0, prompt=5, max_tokens=9, output_tokens=whole[:4]))
    outputs = run_to_end(engine)[0]
    assert tokens_of(outputs) == whole[4:]
    assert outputs[-1].finish_reason == "length"


def test_the_urgent_go_first_under_the_priority_policy() -> None:
    engine, _ = make_engine(max_num_seqs=1, policy="priority")
    for request_id, priority in enumerate([2, 1, 0, 1]):
        engine.add(make_request(request_id, max_tokens=1, priority=priority))
    order = []
    while engine.has_work:
        order += [output.request_id for output in engine.step()]
    assert order == [2, 1, 3, 0]


def test_a_bad_row_ends_alone() -> None:
    engine, _ = make_engine(trouble=Trouble(bad_rows={1: 6}))
    requests = [make_request(request_id, prompt=4, max_tokens=6) for request_id in range(3)]
    for request in requests:
        engine.add(request)
    outputs = run_to_end(engine)
    assert outputs[1][-1].finish_reason == "error"
    assert outputs[1][-1].error == "bad row"
    assert tokens_of(outputs[1]) == expected_output(requests[1])[0][:3]
    assert all(tokens_of(outputs[i]) == expected_output(requests[i])[0] for i in (0, 2))
    assert engine.stats().num_faults == 0


def test_stats() -> None:
    engine, _ = make_engine(num_blocks=10, block_size=4, max_num_seqs=1)
    engine.add(make_request(0, prompt=6, max_tokens=2))
    engine.add(make_request(1, prompt=6, max_tokens=2))
    engine.step()
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting) == (1, 1)
    assert (stats.num_blocks, stats.num_used_blocks, stats.num_cached_blocks) == (10, 2, 0)
    assert (stats.num_steps, stats.step_tokens) == (1, 6)
    assert stats.step_seconds > 0
    run_to_end(engine)
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_used_blocks, stats.num_cached_blocks) == (0, 0, 0, 2)
    assert (stats.num_steps, stats.num_prompt_tokens, stats.num_output_tokens) == (4, 12, 4)


def test_chunked_prefill_can_be_disabled() -> None:
    runner = OracleRunner(100)
    scheduler = Scheduler(KVCache(32, 100, False), max_num_seqs=8, max_num_batched_tokens=100, chunked_prefill=False)
    engine = Engine(scheduler, runner)
    for i, length in enumerate((60, 50, 40, 100, 1)):
        engine.add(make_request(i, length, 1))
    shares = []
    while engine.has_work:
        plan = scheduler.schedule()
        shares.append([len(item.tokens) for item in plan])
        scheduler.commit(plan, runner.submit(plan).sample({}))
    assert shares == [[60], [50, 40], [100], [1]]


def test_a_contiguous_cache_runs_as_many_sequences_as_it_has_blocks() -> None:
    engine, _ = make_engine(num_blocks=8, block_size=100, max_num_batched_tokens=400)
    for request_id in range(8):
        engine.add(make_request(request_id, prompt=30, max_tokens=20))
    engine.step()
    assert len(engine.scheduler.running) == 8, "a block holds all that a sequence can become, so none is kept spare"
    run_to_end(engine)
    assert engine.stats().num_preemptions == 0


def test_a_short_prompt_overtakes_long_ones_by_a_tenth_of_the_first() -> None:
    """Those that wait behind another long one, too; all the others keep their order."""
    engine, runner = make_engine(num_blocks=1000, max_num_seqs=16, max_num_batched_tokens=20)
    first_token: dict[int, int] = {}

    def step() -> None:
        for output in engine.step():
            first_token.setdefault(output.request_id, len(runner.plans))
        engine.check()

    engine.add(make_request(0, prompt=400, max_tokens=1))
    step()
    engine.add(make_request(1, prompt=300, max_tokens=1))
    for number in range(2, 8):
        engine.add(make_request(number, prompt=12, max_tokens=1))
    while engine.has_work:
        step()
    assert [*first_token] == [2, 3, 4, 0, 5, 6, 1, 7]
    assert first_token[2] == 2
    assert first_token[0] <= 1.1 * 400 / 20 + 1
    assert 0 < runner.plans[0][0].seq.num_overtaken <= 40


def test_a_short_prompt_overtakes_only_where_the_first_has_a_place_and_blocks_left() -> None:
    for num_blocks, max_num_seqs in ((200, 2), (176, 16)):
        engine, runner = make_engine(num_blocks=num_blocks, max_num_seqs=max_num_seqs, max_num_batched_tokens=20)
        engine.add(make_request(0, prompt=400, max_tokens=1))
        engine.step()
        engine.add(make_request(1, prompt=296, max_tokens=1))
        engine.add(make_request(2, prompt=12, max_tokens=1))
        engine.step()
        engine.check()
        assert 2 not in planned(runner), (num_blocks, max_num_seqs)
        run_to_end(engine)
