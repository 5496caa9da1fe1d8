"""Prompts first, for so many steps."""

from __future__ import annotations

from octavo.cache.group_cache import GroupSize
from octavo.cache.kv_cache import KVCache
from octavo.config import SchedulerSettings
from octavo.engine.engine import Engine
from octavo.engine.interval import DecodeInterval
from octavo.engine.scheduler import Scheduler
from tests.engine.making import make_engine, make_request, planned, run_to_end, tokens_of
from tests.oracle import OracleRunner, expected_output


def test_decodes_run_in_every_nth_step_only() -> None:
    interval = DecodeInterval(3)
    assert [interval.leaves_out(lambda: True) for _ in range(7)] == [True, True, False, True, True, False, True]
    assert not interval.leaves_out(lambda: False)
    assert [interval.leaves_out(lambda: True) for _ in range(3)] == [True, True, False]
    assert not any(DecodeInterval(1).leaves_out(lambda: True) for _ in range(3))


def test_decoding_waits_for_a_prompt_in_chunks() -> None:
    engine, runner = make_engine(max_num_batched_tokens=8, settings=SchedulerSettings(decode_interval=3))
    engine.add(make_request(0, prompt=4, max_tokens=20))
    engine.step()
    engine.step()
    engine.add(make_request(1, prompt=40, max_tokens=2))
    plans = []
    for _ in range(7):
        engine.step()
        plans.append(planned(runner))
    assert plans == [{1: 8}, {1: 8}, {0: 1, 1: 7}, {1: 8}, {1: 8}, {0: 1, 1: 1}, {0: 1, 1: 1}]
    run_to_end(engine)


def test_decoding_continues_while_no_sequence_can_be_admitted() -> None:
    engine, runner = make_engine(max_num_seqs=2, settings=SchedulerSettings(decode_interval=100))
    for request_id in range(4):
        engine.add(make_request(request_id, prompt=4, max_tokens=6))
    engine.step()
    for _ in range(5):
        engine.step()
        assert planned(runner) == {0: 1, 1: 1}, "2 and 3 have no place"
    run_to_end(engine)


def test_prompts_share_steps_and_all_tokens_are_right() -> None:
    steps = []
    for interval in (None, 4):
        engine, runner = make_engine(max_num_batched_tokens=16, settings=SchedulerSettings(decode_interval=interval))
        requests = [make_request(request_id, prompt=30, max_tokens=12) for request_id in range(6)]
        for request in requests:
            engine.add(request)
        outputs = run_to_end(engine)
        for request in requests:
            assert tokens_of(outputs[request.id]) == expected_output(request)[0]
        steps.append(len(runner.plans))
    assert steps[1] < steps[0] + 12


def test_a_decode_left_out_keeps_its_blocks_though_a_younger_prompt_needs_some() -> None:
    """With a window, a prompt asks for blocks on its way. Who is older is idle then, and no victim all the same. Nor
    does it wait for a prompt that has to wait for it: however long the interval, few steps are empty."""
    scheduler = Scheduler(
        KVCache([GroupSize(5, 8)], 4),
        max_num_seqs=4,
        max_num_batched_tokens=8,
        settings=SchedulerSettings(decode_interval=1000),
    )
    engine = Engine(scheduler, OracleRunner(4, windows=[8]))
    older, younger = make_request(0, prompt=4, max_tokens=60), make_request(1, prompt=60, max_tokens=4)
    engine.add(older)
    for _ in range(12):
        engine.step()
    engine.add(younger)
    outputs = run_to_end(engine)
    assert engine.stats().num_preemptions == 0
    assert tokens_of(outputs[0]) == expected_output(older)[0][12:]
    assert tokens_of(outputs[1]) == expected_output(younger)[0]
