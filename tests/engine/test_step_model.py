"""The model of step time."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest

from octavo.engine.step_model import StepLoad, StepModel, load_of
from tests.engine.making import make_engine, make_request


def seconds_of(load: StepLoad) -> float:
    """Rows that are nearly free up to 256 and cost 20 us each beyond, and all other terms."""
    by_row = 1e-6 * load.rows + 19e-6 * max(0, load.rows - 256)
    other = 3e-4 * load.has_prompt + 1e-5 * load.sequences + 3e-8 * load.context + 1e-9 * load.pairs
    return 0.004 + by_row + other


def any_load(rng: random.Random) -> StepLoad:
    sequences, context = rng.randrange(1, 65), rng.randrange(100_000)
    count = rng.choice([0, 0, rng.randrange(2, 1900)])
    return StepLoad(sequences + count, sequences, context, count > 0, count * rng.randrange(4000))


@pytest.mark.parametrize("scale", [0.01, 1, 100])
def test_it_learns_what_steps_take(scale: float) -> None:
    model, rng = StepModel(2048), random.Random(2)
    for _ in range(1500):
        load = any_load(rng)
        model.learn(load, scale * seconds_of(load) * rng.uniform(0.97, 1.03))
    for load in [StepLoad(1, 1), StepLoad(64, 64, 90_000), *(any_load(rng) for _ in range(50))]:
        assert model.seconds(load) == pytest.approx(scale * seconds_of(load), rel=0.1)
    expected = [
        scale * seconds_of(StepLoad(int(rows), 16, 50_000, True, (rows - 16) * 1000)) for rows in model.knots[1:]
    ]
    assert model.curve(16, 50_000, 1000)[1:] == pytest.approx(np.array(expected), rel=0.1)


def test_sizes_that_were_not_seen_cost_in_proportion() -> None:
    model = StepModel(2048)
    for _ in range(40):
        model.learn(StepLoad(1, 1), 0.004)
        model.learn(StepLoad(2048, 1, 0, True), 0.044)
    assert model.seconds(StepLoad(1024, 1, 0, True)) == pytest.approx(0.024, rel=0.15)


def test_a_single_slow_step_is_not_believed() -> None:
    model = StepModel(64)
    for _ in range(50):
        model.learn(StepLoad(1, 1), 0.01)
    model.learn(StepLoad(1, 1), 10.0)
    assert model.seconds(StepLoad(1, 1)) < 0.03


def test_the_cost_of_prompts_is_remembered_while_none_come() -> None:
    model, rng = StepModel(2048), random.Random(4)
    for _ in range(400):
        load = any_load(rng)
        model.learn(load, seconds_of(load))
    for context in range(3000):
        model.learn(
            StepLoad(16, 16, context * 16), seconds_of(StepLoad(16, 16, context * 16)) * rng.uniform(0.95, 1.05)
        )
    load = StepLoad(1024, 16, 48_000, True, 1000 * 2000)
    assert model.seconds(load) == pytest.approx(seconds_of(load), rel=0.1)


def test_what_a_drafter_takes_is_told_apart_once_it_has_rested() -> None:
    model, rng = StepModel(2048), random.Random(6)
    for step in range(600):
        load = any_load(rng)
        seconds = seconds_of(load)
        if step % 100 < 30:
            load = load._replace(drafted_rows=load.rows, num_proposed=3)
            seconds += 0.002 + 1e-6 * load.rows
        model.learn(load, seconds * rng.uniform(0.97, 1.03))
    for load in (StepLoad(16, 16, 16_000), StepLoad(1024, 16, 48_000, True, 1000 * 2000)):
        drafting = load._replace(drafted_rows=load.rows, num_proposed=3)
        assert drafting.without_drafter == load
        assert model.seconds(load) == pytest.approx(seconds_of(load), rel=0.05)
        assert model.seconds(drafting) - model.seconds(load) == pytest.approx(0.002 + 1e-6 * load.rows, rel=0.3)


def test_it_stays_sound_over_many_steps_of_few_kinds() -> None:
    model, rng = StepModel(2048), random.Random(5)
    loads: list[Callable[[], StepLoad]] = [lambda: StepLoad(8, 8, 9000), lambda: StepLoad(519, 8, 9000, True, 1e6)]
    for step in range(20_000):
        load = loads[step % 50 == 0]()
        model.learn(load, seconds_of(load) * rng.uniform(0.9, 1.1))
    for load in (one() for one in loads):
        assert model.seconds(load) == pytest.approx(seconds_of(load), rel=0.1)
    doubt = model._doubt
    assert np.isfinite(doubt).all()
    assert np.linalg.eigvalsh(doubt).min() > -1e-9 * np.trace(doubt)


def test_a_clock_that_stands_still_teaches_nothing() -> None:
    model = StepModel(512)
    for _ in range(20):
        model.learn(StepLoad(1, 1), 0.0)
    assert not model.is_ready


def test_the_load_of_a_plan() -> None:
    engine, _ = make_engine(max_num_batched_tokens=64)
    engine.add(make_request(0, prompt=9, max_tokens=9))
    engine.step()
    engine.add(make_request(1, prompt=20, max_tokens=9))
    assert load_of(engine.scheduler.schedule()) == StepLoad(21, 2, 9, True, 200.0)
