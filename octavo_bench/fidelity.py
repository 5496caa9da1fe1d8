"""The simulator beside the engine: the same jobs, once computed and twice predicted.

The first prediction is what ``octavo simulate`` would say: the time of a step is learned from other steps, of closed
loops before and after the workload, and what it varies by is drawn. The second repeats the workload's own pauses at the
time at which they came. Where the first is wrong and the second right, the machine was not the same all the time; where
both are wrong, the simulator is.

Machines are faster at one time than at another. So each workload comes in parts, one in each round, with other texts
and lengths each time, and calibrations between; and figures are of all its parts together.
"""

from __future__ import annotations

import heapq
import itertools
import statistics
import sys
import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from octavo.config import EngineConfig, SchedulerSettings
from octavo.engine.engine import Engine
from octavo.engine.timing.schedule_delay import ScheduleDelay
from octavo.engine.timing.step_budget import StepBudget
from octavo.engine.timing.step_model import StepWork
from octavo.engine.timing.step_times import REST, TimedRunner
from octavo.errors import ConfigError
from octavo.types import EngineInfo, Request
from octavo_bench.offline import about_engine, build_prepared
from octavo_fleet.sim.client_metrics import LatencyTargets, Ledger, RequestProgress
from octavo_fleet.sim.clock import START
from octavo_fleet.sim.costs.cost_model import CostModel
from octavo_fleet.sim.costs.fitted import Fitted, fit
from octavo_fleet.sim.jobs import Job, Lengths, Workload
from octavo_fleet.sim.replica import ReplicaSizes
from octavo_fleet.sim.simulate import Fleet, Simulation
from octavo_fleet.sim.workloads import ClosedLoop, Profile, SessionWorkload

SHORT = Profile(0, Lengths(96, 0.6, 512), Lengths(1), Lengths(32, 0.5, 128))
TALK = Profile(128, Lengths(48, 0.6, 256), Lengths(32, 0.6, 256), Lengths(32, 0.5, 128), 3.0, 1.0, 2)
CALIBRATION = ((1, 4), (2, 2), (4, 6), (8, 10), (16, 20)) * 2
"""Clients and requests of the loops that the time of a step is learned from: twice, since one is over in no time. One
client has several, for the first step of a loop follows a pause: without the others, what such a step takes right after
another could not be told from what it takes after a rest."""
PAUSES = Profile(0, Lengths(96, 0.6, 512), Lengths(1), Lengths(4)), 2.0, 4
"""Short answers, how many a second, and requests: of the load that says what a step takes after a pause."""
FULL_LOAD = (16, 48)
"""The same of the loop that says how much the engine can do."""
HELD_EARLY = 0.0002
"""Seconds by which a sleep is to end before a step must be decided; there is a margin behind that."""
NUM_DRAWS = 9
"""All is predicted so many times, with other chances, and the median counts: which request meets a pause is chance."""
AIMS = {
    "output_tokens_per_second": 0.05,
    **dict.fromkeys(("ttft_p50", "ttft_p99", "itl_p50", "itl_p99"), 0.10),
}
"""What is compared, and the error aimed at."""


@dataclass
class Steps:
    """Steps that were timed."""

    works: list[StepWork] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def note(self, work: StepWork, seconds: float) -> None:
        self.works.append(work)
        self.seconds.append(seconds)

    def __add__(self, other: Steps) -> Steps:
        return Steps(self.works + other.works, self.seconds + other.seconds)


class Coming(NamedTuple):
    """A request that is made, and due at ``moment``. What it takes to make one is a client's time."""

    moment: float
    number: int
    job: Job
    request: Request


class Driver:
    """Serves a workload with a real engine, as time goes by."""

    def __init__(
        self,
        engine: Engine,
        vocab_size: int,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.engine = engine
        self.clock = clock
        self.sleep = sleep
        self.steps = Steps()
        self.runner = TimedRunner(engine.runner, lambda work, seconds: self.steps.note(work, seconds), clock)
        engine.runner = self.runner
        self.vocab_size = vocab_size
        self.num_requests = 0
        self.num_served = 0
        """Workloads; what one leaves in the prefix cache is not for the next, since the simulator starts empty."""

    def serve(self, workload: Workload) -> tuple[Ledger, Steps]:
        """What clients saw, and the steps."""
        self.sleep(1.2 * REST)  # a simulation begins after a pause, too
        self.steps = Steps()
        self.engine.spare_time = ScheduleDelay()  # nor does a simulation know any yet, or what steps cost
        scheduler, known = self.engine.scheduler, self.engine.scheduler.step_budget
        scheduler.step_budget = StepBudget(SchedulerSettings(max_itl=known.max_itl), known.most, known.waiting)
        self.num_served += 1
        ledger = Ledger(LatencyTargets())
        live: dict[int, RequestProgress] = {}
        texts: dict[int, list[int]] = {}
        due = [self._make(job, texts) for job in iter(workload.next_job, None)]  # in the order of arrival
        zero, previous = self.clock() - START, -1.0
        while due or self.engine.has_work:
            began = self.clock() - zero
            while due and due[0].moment <= began:
                self._add(heapq.heappop(due), live)
            if not self.engine.has_work:
                self._sleep_until(zero + due[0].moment)
                continue
            if (spare := self.engine.spare_seconds()) > 0:
                self._sleep_until(zero + min([began + spare, *(coming.moment for coming in due[:1])]), HELD_EARLY)
                continue
            outputs = self.engine.step()
            now = self.clock() - zero
            for output in outputs:
                texts.setdefault(live[output.request_id].job.output_token, []).extend(output.tokens)
            for progress in ledger.take(outputs, live, previous, now):
                job = workload.after(progress.job, now - START)
                if job is not None:
                    following = self._make(job, texts)
                    moment = max(following.moment, self.clock() - zero)  # who asks at once does so when it is made
                    heapq.heappush(due, following._replace(moment=moment))
            if outputs:
                previous = now
        return ledger, self.steps

    def _make(self, job: Job, texts: dict[int, list[int]]) -> Coming:
        self.num_requests += 1
        tokens: list[int] = []
        for token, count in job.prompt:
            tokens += texts.get(token) or [token % self.vocab_size] * count
        request = job.request(self.num_requests, 0.0, tokens)
        request = msgspec.structs.replace(request, cache_salt=str(self.num_served))
        return Coming(job.arrival + START, self.num_requests, job, request)

    def _add(self, coming: Coming, live: dict[int, RequestProgress]) -> None:
        self.runner.wake()
        live[coming.number] = RequestProgress(coming.job, coming.moment)
        self.engine.add(msgspec.structs.replace(coming.request, arrival=time.monotonic()))

    def _sleep_until(self, moment: float, early: float = 0.002) -> None:
        """Until just before ``moment`` of the clock. What is left is spent in ``serve``'s loop: all sleeps end late, a
        sleep of no time by a tenth of a millisecond."""
        left = moment - self.clock() - early
        if left > 0:
            self.sleep(left)


def calibrate(driver: Driver, longest: int, seed: int) -> Steps:
    """Time steps of many shapes; the last prompts, of up to ``longest`` tokens, take more than one."""
    loads: list[Workload] = [_loop(*sizes, seed=100 * seed + number) for number, sizes in enumerate(CALIBRATION)]
    loads += [SessionWorkload(*PAUSES, seed=seed), ClosedLoop(3, longest * 3 // 4, 8, 0.33, 1, seed=seed)]
    return sum((driver.serve(load)[1] for load in loads), Steps())


def _loop(clients: int, count: int, seed: int) -> ClosedLoop:
    return ClosedLoop(count, 96, 32, 0.9, clients, seed=seed)


def workloads(speed: float, count: int, number: int) -> list[tuple[str, Callable[[], Workload]]]:
    """Part ``number`` of five workloads for an engine that does ``speed`` requests a second."""
    seed = 10 * number
    return [
        ("one client", lambda: _loop(1, count // 2, seed + 1)),
        ("eight clients", lambda: _loop(8, count, seed + 2)),
        ("poisson", lambda: SessionWorkload(SHORT, 0.6 * speed, count, seed=seed + 3)),
        ("bursts", lambda: SessionWorkload(SHORT, 0.5 * speed, count, burstiness=0.25, seed=seed + 4)),
        ("conversations", lambda: SessionWorkload(TALK, 0.5 * speed, count, seed=seed + 5)),
    ]


class WorkloadPart(NamedTuple):
    """A part of a workload, as it was served."""

    name: str
    make: Callable[[], Workload]
    ledger: Ledger
    own: Steps
    near: Steps
    """Calibrations before and after it."""


def measure(driver: Driver, info: EngineInfo, count: int, rounds: int) -> tuple[list[WorkloadPart], Steps]:
    """Serve each workload in ``rounds`` parts of ``count`` requests; returns these, and all calibrations' steps."""
    longest = min(2 * info.max_num_batched_tokens, info.max_model_len - 64)
    calibrate(driver, longest, seed=99)  # the first steps compile and warm caches
    speed = driver.serve(_loop(*FULL_LOAD, seed=98))[0].figures()["requests_per_second"]
    before = every = calibrate(driver, longest, seed=0)
    parts: list[WorkloadPart] = []
    loads = [load for number in range(rounds) for load in workloads(speed, count, number)]
    for name, make in loads:
        print(f"{len(parts)} of {len(loads)} parts are measured; next: {name}", file=sys.stderr)
        ledger, own = driver.serve(make())
        after = calibrate(driver, longest, seed=len(parts) + 1)
        parts.append(WorkloadPart(name, make, ledger, own, before + after))
        before, every = after, every + after
    return parts, every


@dataclass
class PooledTimes:
    """What the clients of all parts of a workload saw."""

    ledger: Ledger = field(default_factory=Ledger)
    seconds: float = 0.0
    """Of all parts, one after another."""

    def add(self, part: Ledger) -> None:
        self.ledger.merge(part)
        self.seconds += part.ended_at - START

    def figures(self) -> dict[str, float]:
        """Those that are compared."""
        found = {"output_tokens_per_second": self.ledger.num_output_tokens / self.seconds}
        for name, sketch in (("ttft", self.ledger.ttft), ("itl", self.ledger.itl)):
            found |= {f"{name}_p{percent}": sketch.percentile(percent) for percent in (50, 99)}
        return found


def predict(cost: CostModel, info: EngineInfo, engine: EngineConfig, depth: int, workload: Workload) -> Ledger:
    """What clients see of the same jobs on a virtual clock."""
    sizes = ReplicaSizes(info.num_kv_blocks, info.block_size, info.max_num_seqs, info.max_num_batched_tokens, depth)
    simulation = Simulation(
        Fleet(cost, sizes, cache=engine.cache, scheduler=engine.scheduler), workload, LatencyTargets()
    )
    return simulation.results()[0].ledger


def compare(driver: Driver, info: EngineInfo, config: EngineConfig, count: int, rounds: int) -> dict[str, Any]:
    """Measure and predict each workload, in ``rounds`` parts of ``count`` requests. Raises ``ConfigError``."""
    if count < 2 or rounds < 1:
        raise ConfigError(f"num_prompts must be at least 2 and rounds at least 1; they are {count} and {rounds}")
    parts, every = measure(driver, info, count, rounds)
    cost = fit(every.works, every.seconds)
    pools: dict[str, dict[str, list[PooledTimes]]] = {}
    for part in parts:
        near: CostModel = cost.as_of(part.near.works, part.near.seconds)
        models: dict[str, list[CostModel]] = {
            "predicted": [near.of_replica(draw) for draw in range(NUM_DRAWS)],
            "replayed": [Replayed(cost, part.own.works, part.own.seconds)],
        }
        pool = pools.setdefault(part.name, {"measured": [PooledTimes()]})
        pool["measured"][0].add(part.ledger)
        for how, some in models.items():
            for one, model in zip(pool.setdefault(how, [PooledTimes() for _ in some]), some, strict=True):
                one.add(predict(model, info, config, driver.engine.depth, part.make()))
    rows = [_row(name, pool) for name, pool in pools.items()]
    return {
        "rounds": rounds,
        "steps_timed": cost.num_steps,
        "median_error_of_fit": cost.error,
        "figures": len(rows) * len(AIMS),
        **{f"within_{how}": sum(row["within"][how] for row in rows) for how in ("predicted", "replayed")},
        "rows": rows,
    }


def _row(name: str, pools: dict[str, list[PooledTimes]]) -> dict[str, Any]:
    """Each figure as it was measured, and the relative error of each prediction."""
    ((served,), *_) = pools.values()
    row: dict[str, Any] = {"workload": name, "requests": served.ledger.num_finished, "within": {}}
    for figure, aim in AIMS.items():
        progress = {how: statistics.median(one.figures()[figure] for one in some) for how, some in pools.items()}
        row[figure] = {"measured": (real := progress.pop("measured"))}
        for how, value in progress.items():
            row[figure][how] = round(value / real - 1, 4)
            row["within"][how] = row["within"].get(how, 0) + (abs(value / real - 1) <= aim)
    return row


def run(config: EngineConfig, num_prompts: int, rounds: int) -> dict[str, Any]:
    """``compare`` for the engine of ``config``."""
    engine, info = build_prepared(config)
    found = compare(Driver(engine, info.vocab_size), info, config, num_prompts, rounds)
    return {**about_engine(config, info), **found}


class Replayed(CostModel):
    """A fit with the ratios of one run, at the time of the run at which they were: its pauses come when they came."""

    def __init__(self, fitted: Fitted, works: Sequence[StepWork], seconds: Sequence[float]) -> None:
        self.fitted = fitted
        self._ends = list(itertools.accumulate(seconds))
        self._ratios = [taken / fitted.expected(work) for work, taken in zip(works, seconds, strict=True)]
        self._spent = 0.0

    def seconds(self, work: StepWork) -> float:
        index = min(bisect_right(self._ends, self._spent + 1e-9), len(self._ends) - 1)  # sums are rounded
        taken = self.fitted.expected(work) * self._ratios[index]
        self._spent += taken
        return taken
