"""Who is found guilty of killing the engine, over simulated lives of it."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.sampling_params import SamplingParams
from octavo.server.live import LiveRequest
from octavo.server.trials import MAX_DEATHS, Trials
from octavo.telemetry.counts import Timing
from octavo.types import Request


def make_live(request_id: int) -> LiveRequest:
    request = Request(request_id, [1], SamplingParams(), max_tokens=100)
    return LiveRequest(request, listener=None, timing=Timing(0.0))  # type: ignore[arg-type]


class World:
    """An engine that dies whenever it would sample the fatal token of one of ``poisons`` (id -> position)."""

    def __init__(self, count: int, poisons: dict[int, int], batch: int, need: int = 6) -> None:
        self.trials = Trials()
        self.live = {i: make_live(i) for i in range(count)}
        self.inside: list[LiveRequest] = []
        self.poisons = poisons
        self.batch = batch
        self.need = need
        self.deaths = 0
        self.convicted: list[int] = []
        self.finished: list[int] = []
        self.trials.holds_back = True

    def admit(self) -> None:
        if self.trials.holds_back:
            self.inside += self.trials.admit(self.live.values())

    def die(self) -> None:
        self.deaths += 1
        self.inside.clear()
        for live in self.trials.on_death(self.live.values()):
            self.convicted.append(live.id)
            del self.live[live.id]

    def step(self) -> None:
        self.admit()
        running = self.inside[: self.batch]
        assert running, "somebody lives and nobody may run"
        if any(self.poisons.get(live.id) == len(live.tokens) for live in running):
            self.die()
            return
        for live in running:
            live.tokens.append(0)
            live.deaths = 0
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
def test_exactly_the_poisons_are_convicted_within_four_deaths_each(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 12))
    ids = st.integers(0, count - 1)
    poisons = data.draw(st.dictionaries(ids, st.integers(0, 5), max_size=4))
    world = World(count, poisons, batch=data.draw(st.integers(1, 12)))
    world.run()
    assert sorted(world.convicted) == sorted(poisons)
    assert sorted(world.finished) == [i for i in range(count) if i not in poisons]
    assert world.deaths <= 4 * len(poisons) + 2


def test_one_poison_costs_three_deaths_when_it_is_the_newest() -> None:
    world = World(16, {15: 0}, batch=16)
    world.run()
    assert world.convicted == [15]
    assert world.deaths == 3


def test_kills_from_outside_convict_nobody_who_makes_progress() -> None:
    rng = random.Random(4)
    world = World(16, {}, batch=16, need=200)
    for _ in range(60):
        for _ in range(rng.randint(1, 5)):
            world.step()
        world.die()
    world.run()
    assert world.convicted == []
    assert len(world.finished) == 16


def test_nobody_joins_a_suspect_who_is_alone() -> None:
    trials = Trials()
    suspect, newcomer = make_live(1), make_live(2)
    suspect.deaths = 2
    assert trials.admit([suspect]) == [suspect]
    assert trials.holds_back
    assert trials.admit([suspect, newcomer]) == []
    suspect.deaths = 0
    assert trials.admit([suspect, newcomer]) == [newcomer]
    assert not trials.holds_back


def test_innocents_run_beside_the_second_suspect() -> None:
    trials = Trials()
    first, second, innocent = make_live(1), make_live(2), make_live(3)
    first.deaths = second.deaths = 2
    everyone = [first, second, innocent]
    assert trials.admit(everyone) == [second]
    second.deaths = 0
    assert trials.admit(everyone) == [innocent, first]
    assert trials.on_death(everyone) == []
    assert trials.admit(everyone) == [first], "who was on trial is tried next, alone"
    assert trials.on_death(everyone) == [first]


def test_a_request_that_lives_on_by_one_token_a_life_ends_at_last() -> None:
    trials = Trials()
    live = make_live(1)
    for death in range(1, MAX_DEATHS + 1):
        trials.admit([live])
        live.tokens.append(0)
        live.deaths = 0
        assert trials.on_death([live]) == ([live] if death == MAX_DEATHS else [])
