"""Steps that follow others are decided at the last moment: who comes while the device is busy is in the next one."""

from __future__ import annotations

import random

import pytest

from octavo.cache.kv_cache import KVCache
from octavo.engine.engine import Engine
from octavo.engine.scheduler import Scheduler
from octavo.engine.timing.schedule_delay import MARGIN, NUM_SEEN, PRUDENCE, ScheduleDelay
from octavo.errors import RunnerError
from octavo.sampling_params import SamplingParams
from octavo.types import Masks, Plan, Request, Sampled
from octavo_bench.overhead import InstantStep

DECIDING = 0.0002
"""Seconds that the host takes for a step."""


class Device:
    """A clock, and steps that move it: 5 ms and 10 us for each token, one after another."""

    def __init__(self, by_host: bool = False) -> None:
        self.now = 1.0
        self.free_at = 0.0
        self.idle = 0.0
        """Seconds in which it had nothing to do between two steps."""
        self.by_host = by_host
        self.is_broken = False
        self.plans: list[Plan] = []

    def clock(self) -> float:
        return self.now

    def submit(self, plan: Plan) -> Step:
        self.now += DECIDING
        self.plans.append(plan)
        return Step(plan, self)

    def compute(self, plan: Plan) -> float:
        began = max(self.free_at, self.now)
        self.idle += began - self.free_at
        self.free_at = began + 0.005 + 1e-5 * sum(len(item.tokens) for item in plan)
        return self.free_at


class Step(InstantStep):
    def __init__(self, plan: Plan, device: Device) -> None:
        super().__init__(plan)
        self.device = device
        self.done_at = None if device.by_host else device.compute(plan)

    @property
    def is_started(self) -> bool:
        return self.done_at is not None

    def sample(self, masks: Masks) -> list[Sampled]:
        if self.device.is_broken:
            self.device.is_broken = False
            raise RunnerError("the device is broken")
        done_at = self.done_at or self.device.compute(self.plan)
        self.device.now = max(self.device.now, done_at)
        return super().sample(masks)


def build(device: Device, depth: int = 2) -> Engine:
    cache = KVCache(1024, 16, enable_prefix_caching=False)
    scheduler = Scheduler(cache, max_num_seqs=64, max_num_batched_tokens=256, clock=device.clock)
    return Engine(scheduler, device, depth=depth)


def ask(engine: Engine, request_id: int, prompt: int = 4, tokens: int = 10_000) -> None:
    engine.add(Request(request_id, [1] * prompt, SamplingParams(ignore_eos=True), tokens))


def settled(device: Device, num_requests: int = 1, depth: int = 2) -> Engine:
    """An engine that has decoded for long enough to know how much time there is."""
    engine = build(device, depth)
    for number in range(num_requests):
        ask(engine, number)
    for _ in range(NUM_SEEN + 4):
        engine.step()
    return engine


def test_nothing_is_spare_before_enough_is_known_and_then_the_least_less_a_margin() -> None:
    device = Device()
    plan = settled(device).in_flight[0][0]
    spare = ScheduleDelay()
    for count in range(NUM_SEEN):
        assert spare.during(plan, None) == 0.0
        spare.note(plan, 0.001 * count, 0.004, None)
    assert spare.during(plan, None) == pytest.approx(0.004 - MARGIN)
    spare.note(plan, 0.01, 0.01, None)  # the first one is forgotten
    assert spare.during(plan, None) == pytest.approx(0.005 - MARGIN)
    spare.note(plan, 0.008, 0.0, None)
    assert spare.during(plan, None) == pytest.approx(0.004 - MARGIN), "too late by who knows how much"
    spare.note(plan, 0.0, MARGIN / 2, None)
    assert spare.during(plan, None) == 0.0
    assert spare.during(plan * 2, None) == 0.0, "nothing is known of more sequences"


def test_the_next_step_is_decided_just_before_the_device_needs_it() -> None:
    device = Device()
    engine = settled(device)
    device.idle, spare = 0.0, engine.spare_seconds()
    assert spare == pytest.approx(0.00501 - DECIDING - MARGIN)
    for _ in range(100):
        device.now += max(0.0, engine.spare_seconds())
        engine.step()
    assert device.idle == 0.0
    assert engine.spare_seconds() == pytest.approx(spare), "waiting does not change what is known"
    device.now += 0.003
    assert engine.spare_seconds() == pytest.approx(spare - 0.003)


def test_a_request_that_arrives_while_the_device_is_busy_is_in_the_next_step() -> None:
    device = Device()
    engine = settled(device)
    device.now += engine.spare_seconds() - 0.001
    ask(engine, 7)
    device.now += engine.spare_seconds()
    arrival = device.now
    tokens: list[int] = []
    while not tokens:
        tokens = [token for output in engine.step() if output.request_id == 7 for token in output.tokens]
        device.now += max(0.0, engine.spare_seconds())
    assert device.now - arrival < 2 * 0.0052, "the rest of the step under way, and its own"


@pytest.mark.parametrize("stretch", [0.5, 3.0])
def test_when_steps_change_the_device_waits_once_at_most(stretch: float) -> None:
    """Contexts become shorter or longer, or clocks change."""
    device = Device()
    engine = settled(device)
    plain = device.compute

    def compute(plan: Plan) -> float:
        before = max(device.free_at, device.now)
        device.free_at = before + stretch * (plain(plan) - before)
        return device.free_at

    device.compute = compute  # type: ignore[method-assign]
    device.idle = 0.0
    for _ in range(30):
        device.now += max(0.0, engine.spare_seconds())
        engine.step()
    assert device.idle < 0.0025
    assert engine.spare_seconds() == pytest.approx(stretch * 0.00501 - DECIDING - MARGIN, abs=2e-4)


def test_a_step_with_a_prompt_is_not_taken_for_a_measure() -> None:
    """After long steps with prompts in them comes a short one, and the device must not wait for what follows it."""
    device = Device()
    engine = settled(device, num_requests=2)
    known = engine.spare_time.during(engine.in_flight[0][0], None)
    for number in range(20):  # from here on every step has a prompt in it
        ask(engine, 100 + number, prompt=40, tokens=1)
        engine.step()
    assert engine.spare_time.during(engine.in_flight[0][0], None) == pytest.approx(known)


def test_a_step_of_prompts_is_waited_for_by_what_it_is_predicted_to_take() -> None:
    device = Device()
    engine = build(device)
    ask(engine, 0, prompt=15_000, tokens=10)
    for _ in range(30):  # 7.56 ms each
        device.now += max(0.0, engine.spare_seconds())
        engine.step()
    device.idle, spare = 0.0, engine.spare_seconds()
    assert 0.5 * 0.00756 < spare < PRUDENCE * 0.00756
    device.now += spare - 0.001
    ask(engine, 7)
    device.now += engine.spare_seconds()
    engine.step()
    assert [item.seq.id for item in device.plans[-1]] == [0, 7], "it is in the step behind the one under way"
    assert device.idle == 0.0


def test_what_the_host_computes_is_not_waited_for() -> None:
    device = Device(by_host=True)
    engine = settled(device)
    assert engine.in_flight
    assert engine.spare_seconds() <= 0.0


def test_one_step_at_a_time_leaves_nothing_to_wait_for() -> None:
    engine = settled(Device(), depth=1)
    assert engine.spare_seconds() <= 0.0


def test_a_step_that_failed_is_over_too() -> None:
    device = Device()
    engine = settled(device)
    spare = engine.spare_seconds()
    device.is_broken = True
    device.now += 1.0
    engine.step()
    for _ in range(3 * NUM_SEEN):
        engine.step()
    assert engine.spare_seconds() == pytest.approx(spare)
    assert engine.scheduler.stats.step_seconds < 0.006, "a step takes what passed since the one before it"


def test_over_a_random_load_the_device_hardly_waits() -> None:
    rng = random.Random(5)
    device = Device()
    engine = build(device)
    number, num_steps = 0, 0
    while num_steps < 3000:
        while len(engine.scheduler.running) + len(engine.scheduler.waiting) < 16:
            number += 1
            ask(engine, number, prompt=rng.randrange(8, 200), tokens=rng.randrange(4, 64))
        if (spare := engine.spare_seconds()) > 0:
            device.now += spare * rng.choice((0.3, 1.0))
            continue
        engine.step()
        num_steps += 1
        if num_steps == 100:
            device.idle, began = 0.0, device.now
    assert device.idle < 0.01 * (device.now - began)
