"""The model of step time."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest

from octavo.engine.timing.step_model import StepModel, StepWork, work_of
from tests.engine.making import make_engine, make_request


def step(tokens: int, sequences: int, context: int = 0, has_prompt: bool = False, pairs: int = 0) -> StepWork:
    """A step behind ``context`` positions, with so many pairs in addition to one query of each sequence."""
    context += tokens
    return StepWork(tokens, sequences, context, context + pairs, sequences=sequences, has_prompt=int(has_prompt))


def seconds_of(work: StepWork) -> float:
    """Rows that are nearly free up to 256 and cost 20 us each beyond, and all other terms."""
    by_row = 1e-6 * work.tokens + 19e-6 * max(0, work.tokens - 256)
    before, pairs = work.context - work.tokens, work.pairs - work.context
    return 0.004 + by_row + 3e-4 * work.has_prompt + 1e-5 * work.sequences + 3e-8 * before + 1e-9 * pairs


def any_work(rng: random.Random) -> StepWork:
    sequences, context = rng.randrange(1, 65), rng.randrange(100_000)
    count = rng.choice([0, 0, rng.randrange(2, 1900)])
    return step(sequences + count, sequences, context, count > 0, count * rng.randrange(4000))


@pytest.mark.parametrize("scale", [0.01, 1, 100])
def test_it_learns_what_steps_take(scale: float) -> None:
    model, rng = StepModel(2048), random.Random(2)
    for _ in range(1500):
        work = any_work(rng)
        model.learn(work, scale * seconds_of(work) * rng.uniform(0.97, 1.03))
    for work in [step(1, 1), step(64, 64, 90_000), *(any_work(rng) for _ in range(50))]:
        assert model.seconds(work) == pytest.approx(scale * seconds_of(work), rel=0.1)
    expected = [
        scale * seconds_of(step(int(rows), 16, 50_000, True, (int(rows) - 16) * 1000)) for rows in model.knots[1:]
    ]
    assert model.curve(16, 50_000, 1000)[1:] == pytest.approx(np.array(expected), rel=0.1)


def test_sizes_that_were_not_seen_cost_in_proportion() -> None:
    model = StepModel(2048)
    for _ in range(40):
        model.learn(step(1, 1), 0.004)
        model.learn(step(2048, 1, 0, True), 0.044)
    assert model.seconds(step(1024, 1, 0, True)) == pytest.approx(0.024, rel=0.15)


def test_a_single_slow_step_is_not_believed() -> None:
    model = StepModel(64)
    for _ in range(50):
        model.learn(step(1, 1), 0.01)
    model.learn(step(1, 1), 10.0)
    assert model.seconds(step(1, 1)) < 0.03


def test_the_cost_of_prompts_is_remembered_while_none_come() -> None:
    model, rng = StepModel(2048), random.Random(4)
    for _ in range(400):
        work = any_work(rng)
        model.learn(work, seconds_of(work))
    for context in range(3000):
        model.learn(step(16, 16, context * 16), seconds_of(step(16, 16, context * 16)) * rng.uniform(0.95, 1.05))
    work = step(1024, 16, 48_000, True, 1000 * 2000)
    assert model.seconds(work) == pytest.approx(seconds_of(work), rel=0.1)


def test_what_a_drafter_takes_is_told_apart_once_it_has_rested() -> None:
    model, rng = StepModel(2048), random.Random(6)
    for number in range(600):
        work = any_work(rng)
        seconds = seconds_of(work)
        if number % 100 < 30:
            work = work._replace(drafted_rows=work.tokens, num_proposed=3)
            seconds += 0.002 + 1e-6 * work.tokens
        model.learn(work, seconds * rng.uniform(0.97, 1.03))
    for work in (step(16, 16, 16_000), step(1024, 16, 48_000, True, 1000 * 2000)):
        drafting = work._replace(drafted_rows=work.tokens, num_proposed=3)
        assert model.seconds(work) == pytest.approx(seconds_of(work), rel=0.05)
        assert model.seconds(drafting) - model.seconds(work) == pytest.approx(0.002 + 1e-6 * work.tokens, rel=0.3)


def test_a_draft_costs_more_behind_a_longer_context() -> None:
    model, rng = StepModel(2048), random.Random(8)
    for _ in range(800):
        work, position = any_work(rng), rng.randrange(60_000)
        drafts = rng.choice([0, 0, rng.randrange(1, 65)])
        more = work.context + drafts, work.pairs + drafts * (position + 1)
        tokens = work.tokens + drafts
        work = work._replace(tokens=tokens, context=more[0], pairs=more[1], num_verified=drafts)
        model.learn(work, (seconds_of(work) + 2e-6 * drafts) * rng.uniform(0.98, 1.02))
    for position in (0, 50_000):
        assert model.draft_seconds(300, 32, position) == pytest.approx(22e-6 + 1e-9 * position, rel=0.2)


@pytest.mark.slow
def test_it_stays_sound_over_many_steps_of_few_kinds() -> None:
    model, rng = StepModel(2048), random.Random(5)
    works: list[Callable[[], StepWork]] = [lambda: step(8, 8, 9000), lambda: step(519, 8, 9000, True, 1_000_000)]
    for number in range(20_000):
        work = works[number % 50 == 0]()
        model.learn(work, seconds_of(work) * rng.uniform(0.9, 1.1))
    for work in (one() for one in works):
        assert model.seconds(work) == pytest.approx(seconds_of(work), rel=0.1)
    doubt = model._doubt
    assert np.isfinite(doubt).all()
    assert np.linalg.eigvalsh(doubt).min() > -1e-9 * np.trace(doubt)


def test_a_clock_that_stands_still_teaches_nothing() -> None:
    model = StepModel(512)
    for _ in range(20):
        model.learn(step(1, 1), 0.0)
    assert not model.is_ready


def test_the_work_of_a_plan() -> None:
    engine, _ = make_engine(max_num_batched_tokens=64)
    engine.add(make_request(0, prompt=9, max_tokens=9))
    engine.step()
    engine.add(make_request(1, prompt=20, max_tokens=9))
    work = work_of(engine.scheduler.schedule())
    assert work == step(21, 2, 9, True, 19 * 20 // 2)
