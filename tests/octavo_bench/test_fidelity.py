"""The comparison of engine and simulator, on a machine that is even, or uneven in a known way."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from octavo.cache.kv_cache import KVCache
from octavo.config import EngineConfig
from octavo.engine.engine import Engine
from octavo.engine.scheduler import Scheduler
from octavo.engine.timing.step_model import work_of
from octavo.engine.timing.step_times import REST
from octavo.errors import ConfigError
from octavo.llm import LLM
from octavo.sampling_params import SamplingParams
from octavo.types import EngineInfo, Masks, Plan, Sampled
from octavo_bench.fidelity import AIMS, Driver, compare
from octavo_bench.overhead import InstantStep
from octavo_fleet.sim.client_metrics import GROWTH, LatencyTargets
from octavo_fleet.sim.costs.fitted import read_log
from octavo_fleet.sim.setup import SimulationSpec
from octavo_fleet.sim.simulate import Simulation
from tests.llm.tiny import write_checkpoint
from tests.tiers import nightly_after

HOST_SECONDS = 0.0002
LIMITS = {"block_size": 16, "num_kv_blocks": 2000, "max_num_seqs": 32, "max_num_batched_tokens": 256}


class Machine:
    """A clock that a device moves: a step takes 4 ms and 40 us a token, times what ``factor`` says of the moment.

    Steps follow each other; the host takes a fifth of a millisecond to submit one, which the device may be busy in. The
    first step after a pause takes ``waking`` seconds more. Sleeps end ``late``, and to look at the clock takes a
    microsecond.
    """

    def __init__(self, factor: Callable[[float], float], waking: float = 0.0, late: float = 1e-4) -> None:
        self.now = self.free_at = 50.0
        self.factor = factor
        self.waking = waking
        self.late = late

    def __call__(self) -> float:
        self.now += 1e-6
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds + self.late

    def submit(self, plan: Plan) -> Step:
        self.now += HOST_SECONDS
        began = max(self.now, self.free_at) + self.waking * (self.now - self.free_at >= REST)
        self.free_at = began + (0.004 + 4e-5 * work_of(plan).tokens) * self.factor(began)
        return Step(plan, self, self.free_at)


class Step(InstantStep):
    def __init__(self, plan: Plan, machine: Machine, done_at: float) -> None:
        super().__init__(plan)
        self.machine = machine
        self.done_at = done_at

    def sample(self, masks: Masks) -> list[Sampled]:
        self.machine.now = max(self.machine.now, self.done_at)
        return super().sample(masks)


def compared(
    factor: Callable[[float], float],
    count: int,
    rounds: int,
    depth: int = 1,
    waking: float = 0.0,
    late: float = 1e-4,
) -> dict[str, Any]:
    machine = Machine(factor, waking, late)
    cache = KVCache(LIMITS["num_kv_blocks"], LIMITS["block_size"])
    scheduler = Scheduler(cache, max_num_seqs=LIMITS["max_num_seqs"], max_num_batched_tokens=256, clock=machine)
    named = dict.fromkeys(("architecture", "dtype", "device"), "")
    info = EngineInfo(1024, 32_000, (), **LIMITS, **named, num_parameters=0, memory={}, kernels={})
    driver = Driver(Engine(scheduler, machine, depth=depth), info.vocab_size, machine, machine.sleep)
    return compare(driver, info, EngineConfig.from_flat({"enable_partial_reuse": False}), count, rounds)


TWO_STEPS = GROWTH**2 - 1 + 1e-4
"""The simulator knows percentiles to steps of this factor."""


@pytest.mark.parametrize("depth", nightly_after(1, (2, 1)))
def test_on_an_even_machine_both_predictions_are_right(depth: int) -> None:
    result = compared(lambda now: 1.0, 20, 2, depth)
    assert result["figures"] == 25
    assert result["within_predicted"] == result["within_replayed"] == 25, result["rows"]
    errors = [abs(row[figure]["predicted"]) for row in result["rows"] for figure in AIMS]
    assert max(errors) < TWO_STEPS, result["rows"]


@pytest.mark.parametrize("depth", nightly_after(1, (2, 1)))
def test_what_a_step_takes_after_a_pause_is_learned(depth: int) -> None:
    result = compared(lambda now: 1.0, 20, 1, depth, waking=0.01)
    assert result["within_predicted"] == result["within_replayed"] == 25, result["rows"]


@pytest.mark.nightly
def test_requests_are_taken_in_when_they_are_due_however_late_sleeps_end() -> None:
    result = compared(lambda now: 1.0, 20, 1, late=0.0015)
    assert result["within_predicted"] == result["within_replayed"] == 25, result["rows"]
    for row in result["rows"]:
        assert abs(row["ttft_p50"]["predicted"]) < 0.02, row


@pytest.mark.parametrize(("count", "rounds"), [(1, 1), (2, 0)])
def test_nothing_to_compare_is_refused(count: int, rounds: int) -> None:
    with pytest.raises(ConfigError, match="num_prompts must be at least 2 and rounds at least 1"):
        compared(lambda now: 1.0, count, rounds)


@pytest.mark.nightly
def test_noise_of_single_steps_is_drawn_as_it_was() -> None:
    rng = random.Random(1)
    result = compared(lambda now: rng.lognormvariate(0, 0.1) * (8 if rng.random() < 0.002 else 1), 40, 3)
    assert result["within_replayed"] == 25, result["rows"]
    for row in result["rows"]:  # 99th percentiles are a matter of the few requests that met a pause
        assert abs(row["output_tokens_per_second"]["predicted"]) < 0.05, row
        assert abs(row["ttft_p50"]["predicted"]) < 0.1, row
        assert abs(row["itl_p50"]["predicted"]) < 0.1, row


@pytest.mark.nightly
def test_a_machine_that_becomes_slower_is_followed() -> None:
    """It is half as fast in the end, which calibrations before and after a workload see."""
    result = compared(lambda now: 1 + (now - 50) / 100, 20, 1)
    for row in result["rows"]:
        assert abs(row["output_tokens_per_second"]["predicted"]) < 0.1, row
        assert abs(row["itl_p50"]["predicted"]) < 0.1, row


def test_a_fleet_predicted_from_the_log_of_an_engine_that_served(tmp_path: Path) -> None:
    log = tmp_path / "steps.jsonl"
    checkpoint = write_checkpoint(tmp_path)
    settings: dict[str, Any] = {"load_format": "dummy", "block_size": 4, "num_kv_blocks": 64, "max_model_len": 64}
    with LLM(checkpoint, **settings, step_log=str(log)) as llm:
        params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
        llm.generate([[1 + i, 2, 3] for i in range(6)] + [[7] * 20], params)
        for number in range(3):
            llm.generate([[9 + number] * 8], params)
    works, seconds = read_log(log)
    assert len(works) > 100
    assert sum(work.tokens for work in works) >= 6 * 32 + 49
    assert min(seconds) > 0
    spec = SimulationSpec(
        "llama-3.1-8b", "h200", "single", 20, rate=50, input_len=16, output_len=8, cost_log=log, depth=1
    )
    figures = Simulation(spec.fleet(EngineConfig()), spec.clients(), LatencyTargets()).run()
    assert figures["requests"] == 20
    assert 0.5 * min(seconds) < figures["itl"]["p50"] < 2 * max(seconds)
