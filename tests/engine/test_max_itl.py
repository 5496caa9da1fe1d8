"""Prompts chunked so that ITL stays below a limit."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field

import pytest

from octavo.config import SchedulerSettings
from octavo.engine.timing.step_budget import LEAST_CHUNK
from octavo.sampling_params import SamplingParams
from octavo.types import Plan, Request
from tests.engine.making import make_engine, make_request, planned
from tests.engine.virtual import StepCost, VirtualEngine
from tests.tiers import nightly_after, one_in


@dataclass(frozen=True)
class RoughCost(StepCost):
    """Steps whose time is not linear, and not always the same."""

    rng: random.Random = field(default_factory=lambda: random.Random(1))

    def seconds(self, plan: Plan) -> float:
        reads = sum(item.start * len(item.tokens) for item in plan)
        return (super().seconds(plan) + reads * 2e-9) * self.rng.uniform(0.95, 1.05)


def mixed_load(num_prompts: int) -> list[Request]:
    """Some that talk for long, and long prompts all the time."""
    talkers = [Request(n, [n, 1, 2], SamplingParams(), 1500, arrival=1.0) for n in range(16)]
    prompts = [
        Request(100 + n, [5000 + n, *range(2999)], SamplingParams(), 2, arrival=1.5 + n / 4) for n in range(num_prompts)
    ]
    return talkers + prompts


def worst_gaps(max_itl: float | None, cost: StepCost, depth: int = 1) -> tuple[float, float, float]:
    """Of those that talk: the longest gap after a second of learning, and that of 99 in 100. And the tokens' rate."""
    engine = VirtualEngine(SchedulerSettings(max_itl=max_itl), cost=cost, depth=depth, max_num_batched_tokens=2048)
    told = engine.serve(mixed_load(20))
    gaps = sorted(
        gap
        for number in range(16)
        for gap, when in zip(told[number].gaps, told[number].token_times, strict=False)
        if when > 2.5
    )
    return gaps[-1], gaps[int(len(gaps) * 0.99)], engine.runner.num_computed / engine.runner.now


@one_in(5)
@pytest.mark.slow
@pytest.mark.parametrize("cost", [StepCost(), RoughCost(), StepCost(0.001, 0.0001, 0.0001)])
@pytest.mark.parametrize("depth", [1, 2])
def test_itl_stays_below_the_limit(cost: StepCost, depth: int) -> None:
    limit = 0.012
    unbounded, _, _ = worst_gaps(None, cost, depth)
    assert unbounded > 2 * limit, "there is nothing to bound"
    longest, p99, _ = worst_gaps(limit, cost, depth)
    assert p99 <= limit
    assert longest <= 1.25 * limit


def test_the_limit_is_used_up() -> None:
    """Slices are as long as allowed: half the limit would take more time in all."""
    _, _, fast = worst_gaps(0.020, StepCost())
    _, _, slow = worst_gaps(0.008, StepCost())
    assert fast > slow


def test_a_prompt_alone_is_not_sliced() -> None:
    """Also where steps took longer than the limit, and the last of them ended a sequence."""
    settings = SchedulerSettings(max_itl=0.001)
    engine, runner = make_engine(
        num_blocks=400, max_num_batched_tokens=500, settings=settings, clock=itertools.count(1.0, 0.01).__next__
    )
    for number in range(3):
        engine.add(make_request(number, prompt=400, max_tokens=1))
        engine.step()
        assert planned(runner) == {number: 400}


def test_a_prompt_goes_on_though_the_limit_cannot_be_kept() -> None:
    cost = StepCost(base=1.0)
    engine = VirtualEngine(SchedulerSettings(max_itl=0.01), cost=cost)
    talker = Request(0, [1, 2], SamplingParams(), 60, arrival=1.0)
    prompt = Request(1, list(range(90)), SamplingParams(), 2, arrival=2.0)
    told = engine.serve([talker, prompt])
    assert len(told[0].token_times) == 60
    assert len(told[1].token_times) == 2


def test_it_admits_no_more_than_the_limit_bears() -> None:
    cost = StepCost(0.001, 0.0, 0.001)
    engine = VirtualEngine(SchedulerSettings(max_itl=0.011), cost=cost)
    requests = [Request(n, [n, 5], SamplingParams(), 300, arrival=1.0 + n / 10) for n in range(30)]
    told = engine.serve(requests)
    gaps = [gap for one in told.values() for gap in one.gaps]
    assert max(gaps) <= 0.011
    assert max(gaps) > 0.008
    assert LEAST_CHUNK > 1


@pytest.mark.slow
@pytest.mark.parametrize("depth", nightly_after(1, [2, 1]))
def test_targets_for_the_first_token_and_between_tokens_hold_together(depth: int) -> None:
    """Long prompts that have time, and short ones in between that have none, while others decode."""
    talkers = [Request(n, [n, 1, 2], SamplingParams(), 1200, arrival=1.0) for n in range(8)]
    patient = [
        Request(100 + n, [5000 + n, *range(1999)], SamplingParams(), 2, arrival=2.6, ttft_target=20.0)
        for n in range(60)
    ]
    urgent = [
        Request(200 + n, [9000 + n, *range(199)], SamplingParams(), 20, arrival=3.0 + n / 2, ttft_target=0.1)
        for n in range(8)
    ]
    late = {}
    for policy in ("priority", "deadline"):  # of one priority, by arrival
        settings = SchedulerSettings(scheduling_policy=policy, max_itl=0.012)
        engine = VirtualEngine(settings, depth=depth, max_num_seqs=16, num_blocks=8192)
        told = engine.serve([*talkers, *patient, *urgent])
        gaps = sorted(
            gap for n in range(8) for gap, when in zip(told[n].gaps, told[n].token_times, strict=False) if when > 2.5
        )
        assert gaps[int(0.99 * len(gaps))] <= 0.012
        late[policy] = sum(one.ttft > one.request.ttft_target for one in told.values() if one.request.ttft_target)
    assert late["priority"] >= 4, "there is nothing to order"
    assert late["deadline"] == 0
