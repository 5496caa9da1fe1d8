"""The step loop, and what a step costs."""

from __future__ import annotations

import gc
import itertools
from concurrent.futures import Future
from typing import Any

import msgspec
import pytest

from octavo.engine.engine import Engine
from octavo.engine.speculative.proposer import NO_PROPOSAL, Proposal
from octavo.engine.speculative.speculation import Speculation
from octavo.engine.timing import step_budget
from octavo.engine.timing.step_times import TimedRunner
from octavo.errors import InvalidParameter
from octavo.sampling_params import SamplingParams
from octavo.types import Masks, Plan, Request, Sequence
from tests.engine.making import make_engine, make_request, run_to_end, tokens_of
from tests.operations import count_lines
from tests.oracle import expected_output


def test_an_idle_engine_does_nothing() -> None:
    engine, runner = make_engine()
    assert not engine.has_work
    assert engine.step() == []
    assert runner.plans == []


def test_depth_is_how_many_steps_are_submitted_ahead() -> None:
    for depth in (1, 2, 3):
        engine, runner = make_engine(depth=depth)
        request = make_request(0, max_tokens=8)
        engine.add(request)
        engine.step()
        assert len(runner.plans) == depth
        assert len(engine.in_flight) == depth - 1
        outputs = run_to_end(engine)
        assert tokens_of(outputs[0]) == expected_output(request)[0][1:]
        assert not engine.in_flight


class Diary:
    """Grammars and a proposer that only write down when they were asked."""

    num_lookahead = 0

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []
        self.future: Future[Any] = Future()

    def masks(self, plan: Plan) -> Masks:
        self.calls.append(("masks", len(plan)))
        return {}

    def prepare(self, request: Request) -> Future[Any]:
        self.calls.append(("prepare", request.id))
        return self.future

    def propose(self, seq: Sequence, count: int) -> Proposal:
        self.calls.append(("propose", count))
        return NO_PROPOSAL

    def forget(self, seq: Sequence) -> None:
        self.calls.append(("forget", seq.id))


def test_collaborators_take_part_in_every_step() -> None:
    engine, runner = make_engine()
    diary = Diary()
    engine.scheduler.speculation = Speculation(diary, 4)
    engine = Engine(engine.scheduler, runner, grammars=diary)
    engine.add(make_request(0, max_tokens=4))
    run_to_end(engine)
    masks = ("masks", 1)
    assert diary.calls == [masks, ("propose", 2), masks, ("propose", 1), masks, masks, ("forget", 0)]


def test_a_request_waits_for_its_grammar_while_others_run() -> None:
    engine, runner = make_engine()
    diary = Diary()
    engine = Engine(engine.scheduler, runner, grammars=diary)
    bound = msgspec.structs.replace(make_request(0, max_tokens=3), params=SamplingParams(grammar="{}"))
    engine.add(bound)
    engine.add(make_request(1, max_tokens=2))
    assert diary.calls == [("prepare", 0)]
    first = engine.step() + engine.step()
    assert [output.request_id for output in first] == [1, 1]
    assert engine.has_work
    assert engine.stats().num_waiting == 1
    assert engine.step() == []
    diary.future.set_result("a matcher")
    assert [output.request_id for output in engine.step()] == [0]
    assert engine.scheduler.running[0].grammar == "a matcher"
    run_to_end(engine)
    assert not engine.has_work


def test_a_grammar_that_fails_ends_its_own_request() -> None:
    engine, runner = make_engine()
    diary = Diary()
    engine = Engine(engine.scheduler, runner, grammars=diary)
    engine.add(msgspec.structs.replace(make_request(0), params=SamplingParams(grammar="{}")))
    diary.future.set_exception(ValueError("has no such rule"))
    (output,) = engine.step()
    assert (output.request_id, output.finish_reason) == (0, "error")
    assert output.error == "the grammar has no such rule"
    assert not engine.has_work


def test_a_request_can_be_aborted_while_its_grammar_is_prepared() -> None:
    engine, runner = make_engine()
    diary = Diary()
    engine = Engine(engine.scheduler, runner, grammars=diary)
    engine.add(msgspec.structs.replace(make_request(0), params=SamplingParams(grammar="{}")))
    engine.abort(0)
    diary.future.set_result("a matcher")
    assert not engine.has_work
    assert engine.step() == []


def test_an_engine_without_grammars_refuses_them() -> None:
    engine, _ = make_engine()
    with pytest.raises(InvalidParameter, match="structured output"):
        engine.add(msgspec.structs.replace(make_request(0), params=SamplingParams(grammar="{}")))


def busy_engine(num_seen: int, num_waiting: int) -> Engine:
    """An engine with eight sequences decoding, after ``num_seen`` others, while some wait."""
    engine, _ = make_engine(num_blocks=4096, max_num_seqs=8)
    for request_id in range(num_seen):
        engine.add(make_request(request_id, prompt=5, max_tokens=2))
        if request_id % 8 == 7:
            while engine.has_work:
                engine.step()
    for request_id in range(num_seen, num_seen + 8 + num_waiting):
        engine.add(make_request(request_id, prompt=5, max_tokens=20))
    for _ in range(3):
        engine.step()
    return engine


def test_step_cost_does_not_depend_on_requests_seen_or_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_budget, "DECODES_BETWEEN_SAMPLES", 1)
    ticks = itertools.count()
    monkeypatch.setattr(TimedRunner.__init__, "__defaults__", (lambda: next(ticks) / 1000,))  # all take equally long
    fresh = busy_engine(0, 0)
    costs = [count_lines(fresh.step) for _ in range(4)]
    assert costs[0] > 100
    for engine in (busy_engine(2000, 0), busy_engine(0, 2000)):
        assert [count_lines(engine.step) for _ in range(4)] == costs
        assert count_lines(engine.stats) == count_lines(fresh.stats)


def test_nothing_is_kept_of_requests_that_ended() -> None:
    def num_objects(num_requests: int) -> int:
        engine, runner = make_engine(num_blocks=32, max_num_seqs=4)
        for request_id in range(num_requests):
            engine.add(make_request(request_id, prompt=6, max_tokens=3, cache_salt=f"tenant {request_id}"))
            engine.step()
            engine.abort(request_id - request_id % 3)
            if request_id % 4 == 3:
                run_to_end(engine)
            for kept in (runner.tables, runner.digests, runner.plans):
                kept.clear()
        gc.collect()
        return len(gc.get_objects())

    num_objects(50)
    assert abs(num_objects(1000) - num_objects(200)) < 100
