"""The log of steps: what each computed, and seconds that add up to the time that passed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from octavo.cache.kv_cache import KVCache
from octavo.engine.engine import Engine
from octavo.engine.scheduler import Scheduler
from octavo.engine.timing.step_model import StepWork
from octavo.engine.timing.step_times import TimedRunner, logged
from octavo.errors import ConfigError, RunnerError
from octavo.types import Masks, Plan, Sampled
from octavo_bench.overhead import InstantRunner, InstantStep
from tests.engine.making import make_request


class Clock:
    """Moves only when told."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Taking:
    """A device that takes three seconds for a step, one step after another."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.free_at = 0.0

    def submit(self, plan: Plan) -> TakenStep:
        self.free_at = max(self.free_at, self.clock.now) + 3
        return TakenStep(plan, self)


class TakenStep(InstantStep):
    def __init__(self, plan: Plan, device: Taking) -> None:
        super().__init__(plan)
        self.device, self.done_at = device, device.free_at

    def sample(self, masks: Masks) -> list[Sampled]:
        self.device.clock.now = max(self.device.clock.now, self.done_at)
        return super().sample(masks)


def serve_two(depth: int, taking_in: float | None = None) -> tuple[list[tuple[StepWork, float]], list[float]]:
    """Two requests with a long pause between, a second of the host's own time after each step; steps, and ends.

    With ``taking_in`` it is told of each request, and takes so many seconds to take it in.
    """
    clock = Clock()
    noted: list[tuple[StepWork, float]] = []
    runner = TimedRunner(Taking(clock), lambda work, seconds: noted.append((work, seconds)), clock)
    scheduler = Scheduler(KVCache(64, 4), max_num_seqs=4, max_num_batched_tokens=16)
    engine = Engine(scheduler, runner, depth=depth)
    ends = []
    for number in range(2):
        if taking_in is not None:
            runner.wake()
            clock.now += taking_in
        engine.add(make_request(number, prompt=6, max_tokens=3))
        while engine.has_work:
            engine.step()
            clock.now += 1
        ends.append(clock.now)
        clock.now += 50
    return noted, ends


def test_steps_one_by_one_hold_what_the_host_takes_between_them() -> None:
    noted, _ = serve_two(depth=1)
    works = [work for work, _ in noted]
    alone = StepWork(1, 1, 7, 7, 1, 1, sequences=1)
    prompt = StepWork(6, 1, 6, 21, 1, 1, sequences=1, has_prompt=1)
    assert works[:3] == [prompt, alone, alone._replace(context=8, pairs=8)]
    assert [seconds for _, seconds in noted] == [3, 4, 4, 4, 4, 4], "the pause counts, or the host's second does not"


def test_steps_that_overlap_hide_what_the_host_takes() -> None:
    """Host time before the first step after a pause is unknown: while steps overlap, a submission may be late."""
    noted, _ = serve_two(depth=2)
    assert [seconds for _, seconds in noted] == [3] * 6
    assert [(work.idle, work.rested) for work, _ in noted] == [(1, 1), (0, 0), (0, 0)] * 2


def test_a_step_that_fails_is_not_under_way_any_more() -> None:
    class Failing:
        is_started = False

        def submit(self, plan: Plan) -> Failing:
            return self

        def sample(self, masks: Masks) -> list[Sampled]:
            raise RunnerError("no")

    noted: list[StepWork] = []
    runner = TimedRunner(Failing(), lambda work, seconds: noted.append(work))
    for _ in range(2):
        with pytest.raises(RunnerError):
            runner.submit([]).sample({})
    runner.runner = InstantRunner()
    runner.submit([]).sample({})
    assert [work.idle for work in noted] == [1]


def test_the_log_has_a_line_for_each_step_and_is_added_to(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    for _ in range(2):
        scheduler = Scheduler(KVCache(64, 4), max_num_seqs=4, max_num_batched_tokens=16)
        engine = Engine(scheduler, logged(InstantRunner(), str(path)))
        engine.add(make_request(1, prompt=20, max_tokens=2))
        while engine.has_work:
            engine.step()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["tokens"] for line in lines] == [16, 4, 1] * 2
    assert all(line["seconds"] > 0 for line in lines)


def test_no_log_and_no_place_for_one(tmp_path: Path) -> None:
    runner = InstantRunner()
    assert logged(runner, None) is runner
    with pytest.raises(ConfigError, match="step_log"):
        logged(runner, str(tmp_path / "none" / "steps"))


def test_what_it_takes_to_take_a_request_in_is_in_its_first_step() -> None:
    for depth, later in ((1, 4), (2, 3)):
        noted, _ = serve_two(depth, taking_in=5)
        assert [seconds for _, seconds in noted] == [8, later, later, 8, later, later]
