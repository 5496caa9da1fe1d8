"""A drafter on the executor under load: closed loops through the real scheduler, over a simulated device whose steps
take about as long as those of Qwen3-8B with an EAGLE-3 head on an H100."""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable

import pytest

from octavo.cache.kv_cache import KVCache
from octavo.engine.engine import Engine
from octavo.engine.scheduler import Scheduler
from octavo.engine.speculative.draft_choice import DraftChoice
from octavo.engine.speculative.proposer import DeviceDrafts
from octavo.engine.speculative.speculation import Speculation
from octavo.sampling_params import SamplingParams
from octavo.steps.graph_shapes import NO_DRAFTER, StepKind, StepShape, padded_shape
from octavo.types import Masks, Plan, Sampled
from octavo_fleet.sim.clock import Clock
from octavo_fleet.sim.closed_loops import WORKLOADS, ClosedLoopSpec
from tests.engine.making import make_request
from tests.tiers import nightly_after, one_in

pytestmark = pytest.mark.slow

K, MAX_SEQS = 3, 256
PASSES = 2


def seconds_of(plan: Plan) -> float:
    """The duration of a step: weights are read or multiplied by all rows, the head by those that are sampled."""
    shape = shape_of(plan)
    read, multiplied = 4.7e-3, 22.4e-6 * shape.num_rows
    seconds = math.hypot(read**2, multiplied**2) ** 0.5 + max(0.42e-3, 2.1e-6 * shape.num_samples)
    seconds += 0.3e-3 + 57e-9 * sum(item.start for item in plan)
    seconds += sum(1.7e-9 * len(item.tokens) * (item.start + len(item.tokens) / 2) for item in plan)
    if shape.has_drafter:
        seconds += 0.1e-3 + 0.5e-6 * shape.num_rows + (1.1e-3 + 6e-6 * len(plan)) * (shape.num_proposed > 0)
    return seconds


def seconds_of_mixture(plan: Plan) -> float:
    """The same for Qwen3-30B-A3B: a token chooses 8 of a layer's 128 experts, so that more rows read more weights."""
    shape, num_rows = shape_of(plan), sum(len(item.tokens) + len(item.drafts) for item in plan)
    num_bytes = 2.1e9 + 48 * 9.4e6 * 128 * (1 - (1 - 8 / 128) ** num_rows)
    seconds = num_bytes / 3.0e12 + 0.9e-3 + 3e-6 * num_rows + 30e-9 * sum(item.start for item in plan)
    if shape.has_drafter:
        seconds += 0.045e-3 + (0.5e-3 + 6e-6 * len(plan)) * (shape.num_proposed > 0)
    return seconds


def shape_of(plan: Plan) -> StepShape:
    num_proposed, num_drafts = max(item.num_proposed for item in plan), sum(len(item.drafts) for item in plan)
    kind = StepKind(has_drafter=num_proposed != NO_DRAFTER, num_proposed=max(0, num_proposed))
    num_rows, longest = num_drafts + sum(len(item.tokens) for item in plan), max(len(item.tokens) for item in plan)
    return padded_shape(num_rows, len(plan), longest, MAX_SEQS, kind, num_drafts)[0]


class Device:
    """Computes steps one after another; a draft is accepted with probability ``rate`` if those before it are."""

    def __init__(self, clock: Clock, rate: float, seconds_of: Callable[[Plan], float]) -> None:
        self.clock, self.rate, self.seconds_of = clock, rate, seconds_of
        self.rng = random.Random(1)
        self.free_at = 0.0
        self.num_steps = self.num_resting = 0

    def submit(self, plan: Plan) -> Step:
        self.num_steps += 1
        self.num_resting += plan[0].num_proposed == NO_DRAFTER
        self.free_at = max(self.free_at, self.clock.now) + self.seconds_of(plan) * self.rng.uniform(0.97, 1.03)
        return Step(self, plan, self.free_at)


class Step:
    is_started = True

    def __init__(self, device: Device, plan: Plan, done_at: float) -> None:
        self.device, self.plan, self.done_at = device, plan, done_at

    def sample(self, masks: Masks) -> list[Sampled]:
        device = self.device
        device.clock.now = max(device.clock.now, self.done_at)
        counts = [next((i for i in range(n) if device.rng.random() >= device.rate), n) for n in self.num_drafts]
        return [Sampled([7] * (1 + n) if item.samples else []) for item, n in zip(self.plan, counts, strict=True)]

    @property
    def num_drafts(self) -> list[int]:
        return [len(item.drafts) for item in self.plan]


def tokens_per_second(names: str, rate: float | None, seconds_of: Callable[[Plan], float] = seconds_of) -> float:
    """Of the last of the workloads, whose names are separated by spaces; without a rate, without a drafter."""
    return served(names, rate, seconds_of)[0]


@functools.cache
def served(names: str, rate: float | None, seconds_of: Callable[[Plan], float] = seconds_of) -> tuple[float, Device]:
    """Tokens per second in the last workload, and the device behind the last step."""
    clock, rng = Clock(), random.Random(1)
    device = Device(clock, rate or 0.0, seconds_of)
    speculation = None if rate is None else Speculation(DeviceDrafts(K), K, DraftChoice(K, on_device=True))
    cache = KVCache(4000, 64, enable_prefix_caching=False)
    scheduler = Scheduler(
        cache, max_num_seqs=MAX_SEQS, max_num_batched_tokens=2048, clock=clock, speculation=speculation
    )
    engine = Engine(scheduler, device, depth=2)
    for name in names.split():
        started = clock.now
        num_tokens = answer(engine, WORKLOADS[name], rng)
    return num_tokens / (clock.now - started), device


def answer(engine: Engine, load: ClosedLoopSpec, rng: random.Random) -> int:
    """Passes of a workload behind each other; returns the number of output tokens."""
    num_left, num_live, num_tokens = PASSES * load.prompts, 0, 0
    while num_left or num_live:
        while num_left and num_live < load.concurrency:
            lengths = load.input_len, load.output_len
            prompt, most = (rng.randint(int(n * (1 - load.spread)), int(n * (1 + load.spread))) for n in lengths)
            params = SamplingParams(max_tokens=most, ignore_eos=True)
            engine.add(make_request(num_left, prompt=[1] * prompt, max_tokens=most, params=params))
            num_left, num_live = num_left - 1, num_live + 1
        for output in engine.step():
            num_tokens += len(output.tokens)
            num_live -= output.finish_reason is not None
    return num_tokens


@pytest.mark.parametrize(("name", "least"), nightly_after(1, [("W1", 1.4), ("W2", 1.9), ("W3", 1.1), ("W4", 0.98)]))
def test_drafts_that_are_accepted_make_every_load_faster(name: str, least: float) -> None:
    """2.6 tokens a step at three drafts, with prompts in half of the steps or more."""
    assert tokens_per_second(name, 0.7225) > least * tokens_per_second(name, None)


@pytest.mark.nightly
def test_a_rest_ends_when_the_load_changes() -> None:
    """Drafts for 256 sequences do not pay, and those for 64 do, which do not wait for the end of a long rest."""
    _, device = served("W4", 0.7225)
    assert device.num_resting > 0.5 * device.num_steps
    assert tokens_per_second("W4 W3", 0.7225) > 0.97 * tokens_per_second("W3", 0.7225)


@pytest.mark.nightly
def test_drafts_that_hardly_pay_cost_little() -> None:
    """With 64 sequences, and prompts in most steps, a draft of three is right: few steps gain by drafts."""
    assert tokens_per_second("W3", 0.3) > 0.98 * tokens_per_second("W3", None)


@one_in(2)
@pytest.mark.parametrize(("name", "least"), [("W2", 0.98), ("W1", 1.2)])
def test_experts_that_drafts_choose_are_part_of_their_cost(name: str, least: float) -> None:
    """Two tokens a step at three drafts. One sequence gains nothing: its drafts would read three times the weights."""
    drafted = tokens_per_second(name, 0.544, seconds_of_mixture)
    assert drafted > least * tokens_per_second(name, None, seconds_of_mixture)


@pytest.mark.parametrize("name", nightly_after(1, ["W1", "W2", "W3", "W4"]))
def test_drafts_that_are_rejected_cost_little(name: str) -> None:
    rate, device = served(name, 0.0)
    assert rate > 0.98 * tokens_per_second(name, None)
    assert device.num_resting > 0.8 * device.num_steps
