"""Reports of requests, from events of the real scheduler on a virtual clock."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.config import SchedulerSettings
from octavo.sampling_params import SamplingParams
from octavo.telemetry.explain import as_text, explain
from octavo.telemetry.request_events import MAX_EVENTS, Event, EventLog
from octavo.types import EngineStats, Request
from tests.engine.making import make_engine, make_request, run_to_end
from tests.engine.virtual import StepCost, VirtualEngine
from tests.oracle import Trouble

STEP = 0.01


def request(number: int, arrival: float, prompt: int = 8, output: int = 5, tenant: str = "") -> Request:
    return Request(number, [100 + number, *range(prompt - 1)], SamplingParams(), output, arrival=arrival, tenant=tenant)


def reports(engine: VirtualEngine) -> dict[int, dict[str, Any]]:
    events: dict[int, list[Event]] = {}
    for event in engine.engine.take_events():
        events.setdefault(event.request_id, []).append(event)
    return {
        number: explain(own, (other for key, other in events.items() if key != number))
        for number, own in events.items()
    }


def serve(requests: list[Request], policy: str = "fcfs", **sizes: Any) -> dict[int, dict[str, Any]]:
    engine = VirtualEngine(SchedulerSettings(scheduling_policy=policy), cost=StepCost(STEP, 0, 0), **sizes)
    engine.serve(requests)
    return reports(engine)


def test_queue_prompt_and_decode() -> None:
    found = serve([request(0, 1.0), request(1, 1.0, output=9)], max_num_seqs=1, max_num_batched_tokens=4)
    first, second = found[0], found[1]
    assert first["seconds"] == pytest.approx({"waiting": 0, "prefill": 2 * STEP, "decode": 4 * STEP}, abs=1e-6)
    assert second["seconds"] == pytest.approx({"waiting": 6 * STEP, "prefill": 2 * STEP, "decode": 8 * STEP}, abs=1e-6)
    assert first["chunks"] == second["chunks"] == [4, 4]
    assert (second["waited_behind"], second["status"], second["output_tokens"]) == (1, "length", 9)
    assert first["shared_steps_with"] == []
    assert (first["steps"], first["mean_sequences_per_step"]) == (6, 1.0)


def test_a_turn_of_a_session_says_what_it_found_of_the_turn_before() -> None:
    engine, _ = make_engine(num_blocks=32, block_size=4)
    first = make_request(1, prompt=16, max_tokens=5, session="s")
    engine.add(first)
    run_to_end(engine)
    turns = [[*first.prompt_tokens, 5, 6, 7, 8, 9], first.prompt_tokens[:6], [7] * 9]
    for number, prompt in enumerate(turns, 2):
        engine.add(make_request(number, prompt, session="" if number == 4 else "s"))
        run_to_end(engine)
    events = engine.take_events()
    found = {number: explain([event for event in events if event.request_id == number]) for number in range(1, 5)}
    assert [found[number]["session"] for number in range(1, 5)] == [
        {"turn": 1, "tokens_before": 0, "found": 0},
        {"turn": 2, "tokens_before": 20, "found": 16},
        {"turn": 3, "tokens_before": 0, "found": 0},
        None,
    ]
    assert "  turn 2 of session, 16 of 20 tokens of the turn before found" in as_text(found[2]).splitlines()
    stats = engine.stats()
    assert (stats.session_queries, stats.session_hits, stats.num_sessions) == (20, 16, 1)


def test_the_phases_add_up_to_what_a_client_sees() -> None:
    requests = [request(n, 1.0 + n * 0.003, prompt=5 + n % 40, output=3 + n % 17) for n in range(40)]
    engine = VirtualEngine(
        SchedulerSettings(), cost=StepCost(), num_blocks=24, block_size=4, max_num_seqs=6, max_num_batched_tokens=16
    )
    told = engine.serve(requests)
    assert engine.engine.stats().num_preemptions > 0
    for number, report in reports(engine).items():
        seconds = report["seconds"]
        total = told[number].token_times[-1] - told[number].request.arrival
        late = engine.runner.cost.seconds([]) * 3  # it is heard of between steps
        assert sum(seconds.values()) == pytest.approx(total, abs=late)
        assert sum(report["chunks"]) >= report["prompt_tokens"] - report["cached_tokens"]
        assert report["output_tokens"] == len(told[number].token_times)


def test_requests_of_the_same_steps_are_counted() -> None:
    found = serve([request(0, 1.0, output=10), request(1, 1.0 + 3.5 * STEP, output=3), request(2, 5.0)])
    assert found[0]["shared_steps_with"] == [{"request": 1, "steps": 3}]
    assert found[1]["shared_steps_with"] == [{"request": 0, "steps": 3}]
    assert found[0]["mean_sequences_per_step"] == 1.3
    assert found[2]["shared_steps_with"] == []


def test_a_preemption_names_the_request_that_caused_it() -> None:
    flood = [request(n, 1.0, output=30, tenant="flood") for n in range(4)]
    found = serve([*flood, request(9, 1.05, tenant="quiet")], "fair", max_num_seqs=4)
    (preempted,) = [report for report in found.values() if report["preempted_by"]]
    assert preempted["preempted_by"] == [9]
    assert preempted["seconds"]["waiting"] > 0
    assert [event["event"] for event in preempted["events"]].count("admitted") == 2
    assert "preempted for request 9" in as_text(preempted)


def test_what_was_found_in_the_cache() -> None:
    found = serve([request(0, 1.0, prompt=40), Request(1, [100, *range(39), 5], SamplingParams(), 2, arrival=2.0)])
    assert (found[0]["cached_tokens"], found[1]["cached_tokens"]) == (0, 32)
    assert found[1]["chunks"] == [9]
    assert "32 found in the prefix cache" in as_text(found[1])


def test_faults_are_reported() -> None:
    engine, _ = make_engine(trouble=Trouble(poison={0: 6}))
    engine.add(make_request(0, max_tokens=8))
    engine.add(make_request(1, max_tokens=8))
    run_to_end(engine)
    events = engine.take_events()
    report = explain([event for event in events if event.request_id == 0])
    assert report["status"] == "error"
    assert report["faults"] == 3, "with the other, alone, and again alone"
    assert "forward passes failed" in as_text(report)


def test_a_request_that_is_not_over() -> None:
    engine, _ = make_engine(max_num_seqs=1)
    engine.add(make_request(0))
    engine.add(make_request(1))
    engine.step()
    events = engine.take_events()
    statuses = [explain([event for event in events if event.request_id == n])["status"] for n in (0, 1)]
    assert statuses == ["running", "waiting"]
    assert engine.take_events() == [], "each is given once"


def test_a_request_that_outlived_an_engine_process() -> None:
    log = EventLog(EngineStats(num_steps=50, num_scheduled_seqs=80), lambda: 5.0)
    log.note(7, "arrived", tokens=3)
    log.note(7, "admitted")
    again = EventLog(EngineStats(), lambda: 9.0)
    again.note(7, "arrived", tokens=4)
    again.note(7, "admitted")
    again.note(7, "ended", tokens=2, reason="stop")
    report = explain(log.take() + again.take())
    assert (report["submissions"], report["steps"], report["status"]) == (2, 0, "stop")
    assert "submitted 2 times" in as_text(report)


def test_events_do_not_pile_up() -> None:
    log = EventLog(EngineStats(), lambda: 0.0)
    for number in range(MAX_EVENTS + 10):
        log.note(number, "arrived")
    assert len(log.take()) == MAX_EVENTS
