"""Who is found guilty of killing the engine, over simulated lives of it."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.sampling_params import SamplingParams
from octavo.telemetry.counts import Timing
from octavo.types import Request
from octavo_server.engines.crash_isolation import FAULT, KILL, MOST_EVIDENCE, PROOF, SUSPICION, CrashIsolation
from octavo_server.engines.live_request import LiveRequest


def make_live(request_id: int) -> LiveRequest:
    request = Request(request_id, [1], SamplingParams(), max_tokens=100)
    return LiveRequest(request, listener=None, timing=Timing(0.0))  # type: ignore[arg-type]


class World:
    """An engine that dies whenever it would sample the fatal token of one of ``poisons`` (id -> position).

    With ``is_killed``, it is another process that ends it then.
    """

    def __init__(self, count: int, poisons: dict[int, int], batch: int, need: int = 6, is_killed: bool = False) -> None:
        self.is_killed = is_killed
        self.isolation = CrashIsolation()
        self.live = {i: make_live(i) for i in range(count)}
        self.inside: list[LiveRequest] = []
        self.poisons = poisons
        self.batch = batch
        self.need = need
        self.deaths = 0
        self.failed: list[int] = []
        self.finished: list[int] = []
        self.isolation.holds_back = True

    def admit(self) -> None:
        if self.isolation.holds_back:
            self.inside += self.isolation.admit(self.live.values())

    def die(self, is_from_outside: bool = False) -> None:
        self.deaths += 1
        self.inside.clear()
        for live in self.isolation.on_death(self.live.values(), is_from_outside):
            self.failed.append(live.id)
            del self.live[live.id]

    def step(self) -> None:
        self.admit()
        running = self.inside[: self.batch]
        assert running, "somebody lives and nobody may run"
        if any(self.poisons.get(live.id) == len(live.tokens) for live in running):
            self.die(self.is_killed)
            return
        for live in running:
            live.note_tokens([0])
            if len(live.tokens) == self.need:
                del self.live[live.id]
                self.inside.remove(live)
                self.finished.append(live.id)

    def run(self, limit: int = 10_000) -> None:
        for _ in range(limit):
            if not self.live:
                return
            self.step()
        pytest.fail("it does not end")


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_exactly_the_poisonous_requests_are_failed_within_four_deaths_each(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 12))
    ids = st.integers(0, count - 1)
    poisons = data.draw(st.dictionaries(ids, st.integers(0, 5), max_size=4))
    world = World(count, poisons, batch=data.draw(st.integers(1, 12)))
    world.run()
    assert sorted(world.failed) == sorted(poisons)
    assert sorted(world.finished) == [i for i in range(count) if i not in poisons]
    assert world.deaths <= 4 * len(poisons) + 2


def test_one_poison_costs_three_deaths_when_it_is_the_newest() -> None:
    world = World(16, {15: 0}, batch=16)
    world.run()
    assert world.failed == [15]
    assert world.deaths == 3


def test_kills_from_outside_fail_no_request_that_makes_progress() -> None:
    rng = random.Random(4)
    world = World(16, {}, batch=16, need=200)
    for _ in range(60):
        for _ in range(rng.randint(1, 5)):
            world.step()
        world.die(is_from_outside=True)
    world.run()
    assert world.failed == []
    assert len(world.finished) == 16


def test_no_request_joins_a_suspect_that_runs_alone() -> None:
    isolation = CrashIsolation()
    suspect, newcomer = make_live(1), make_live(2)
    suspect.evidence = SUSPICION
    assert isolation.admit([suspect]) == [suspect]
    assert isolation.holds_back
    assert isolation.admit([suspect, newcomer]) == []
    suspect.evidence = 0
    assert isolation.admit([suspect, newcomer]) == [newcomer]
    assert not isolation.holds_back


def test_innocents_run_with_the_second_suspect() -> None:
    isolation = CrashIsolation()
    first, second, innocent = make_live(1), make_live(2), make_live(3)
    first.evidence = second.evidence = SUSPICION
    everyone = [first, second, innocent]
    assert isolation.admit(everyone) == [second]
    second.evidence = 0
    assert isolation.admit(everyone) == [innocent, first]
    assert isolation.on_death(everyone, is_from_outside=False) == []
    assert isolation.admit(everyone) == [first], "who was on trial is tried next, alone"
    assert isolation.on_death(everyone, is_from_outside=False) == [first]


def test_a_request_that_lives_on_by_one_token_a_life_ends_at_last() -> None:
    isolation = CrashIsolation()
    live = make_live(1)
    most = MOST_EVIDENCE // FAULT
    for death in range(1, most + 1):
        isolation.admit([live])
        live.note_tokens([0])
        assert isolation.on_death([live], is_from_outside=False) == ([live] if death == most else [])


def test_a_request_at_which_the_engine_is_killed_each_time_is_failed_alone() -> None:
    world = World(8, {3: 2}, batch=8, is_killed=True)
    world.run()
    assert world.failed == [3]
    assert sorted(world.finished) == [0, 1, 2, 4, 5, 6, 7]
    assert world.deaths <= PROOF // KILL + 2


def test_kills_from_outside_before_any_progress_fail_no_request_for_long() -> None:
    world = World(4, {}, batch=4)
    for _ in range(SUSPICION // KILL - 1):
        world.admit()
        world.die(is_from_outside=True)
    assert not any(live.evidence >= SUSPICION for live in world.live.values())
    world.run()
    assert world.failed == []


def test_a_finished_step_makes_a_kill_no_evidence_but_not_a_crash() -> None:
    isolation, live = CrashIsolation(), make_live(1)
    for _ in range(200):
        isolation.admit([live])
        live.note_computed(64)  # a stretch of the prompt, the same in each engine process
        assert isolation.on_death([live], is_from_outside=True) == []
    assert live.evidence == 0
    for death in range(3):
        isolation.admit([live])
        live.note_computed(64)
        assert isolation.on_death([live], is_from_outside=False) == ([live] if death == 2 else [])


def test_a_stretch_of_the_prompt_that_was_never_computed_before_is_progress() -> None:
    isolation, live = CrashIsolation(), make_live(1)
    for _ in range(2):
        isolation.admit([live])
        isolation.on_death([live], is_from_outside=False)
    assert live.evidence == SUSPICION
    isolation.admit([live])
    live.note_computed(64)
    assert live.evidence == 0
