"""The simulator beside the engine: the same jobs, once computed and twice predicted.

The first prediction is what ``octavo simulate`` would say: the time of a step is learned from other steps, of closed
loops before and after the workload, and what it varies by is drawn. The second repeats the workload's own pauses at the
time at which they came. Where the first is wrong and the second right, the machine was not the same all the time; where
both are wrong, the simulator is.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from octavo.config import EngineConfig
from octavo.engine.engine import Engine
from octavo.engine.step_times import StepWork, TimedRunner
from octavo.sim.clock import START
from octavo.sim.cost_model import CostModel
from octavo.sim.fitted import Replayed, fit
from octavo.sim.jobs import Job, Lengths, Workload
from octavo.sim.replica import Sizes
from octavo.sim.report import Ledger, Targets, Told
from octavo.sim.simulate import Fleet, Simulation
from octavo.sim.workloads import ClosedLoop, Profile, Sessions
from octavo.types import EngineInfo

SHORT = Profile(0, Lengths(96, 0.6, 512), Lengths(1), Lengths(32, 0.5, 128))
TALK = Profile(128, Lengths(48, 0.6, 256), Lengths(32, 0.6, 256), Lengths(32, 0.5, 128), 3.0, 1.0, 2)
CALIBRATION = ((1, 4), (2, 6), (4, 10), (8, 20), (16, 32))
"""Clients and requests of the loops that the time of a step is learned from."""
FIGURES = (
    ("output_tokens_per_second", "", 0.05),
    *((name, percent, 0.10) for name in ("ttft", "itl") for percent in ("p50", "p99")),
)
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
        engine.runner = TimedRunner(engine.runner, lambda work, seconds: self.steps.note(work, seconds), clock)
        self.vocab_size = vocab_size
        self.num_requests = 0
        self.num_served = 0
        """Workloads; what one leaves in the prefix cache is not for the next, since the simulator starts empty."""

    def serve(self, workload: Workload) -> tuple[dict[str, Any], Steps]:
        """The figures of ``Ledger``, and the steps."""
        self.steps = Steps()
        self.num_served += 1
        ledger = Ledger(Targets())
        live: dict[int, Told] = {}
        texts: dict[int, list[int]] = {}
        due: list[tuple[float, int, Job]] = []
        coming = workload.next_job()
        zero, previous = self.clock() - START, -1.0
        while coming is not None or due or self.engine.has_work:
            began = self.clock() - zero
            while coming is not None and coming.arrival + START <= began:
                self._add(coming, coming.arrival + START, live, texts)
                coming = workload.next_job()
            while due and due[0][0] <= began:
                arrival, _, job = heapq.heappop(due)
                self._add(job, arrival, live, texts)
            if not self.engine.has_work:
                upcoming = [coming.arrival + START] if coming is not None else []
                self._sleep_until(zero + min(upcoming + [arrival for arrival, _, _ in due[:1]]))
                continue
            outputs = self.engine.step()
            now = self.clock() - zero
            for output in outputs:
                texts.setdefault(live[output.request_id].job.output_token, []).extend(output.tokens)
            for told in ledger.take(outputs, live, previous, now):
                following = workload.after(told.job, now - START)
                if following is not None:
                    self.num_requests += 1
                    heapq.heappush(due, (following.arrival + START, self.num_requests, following))
            if outputs:
                previous = now
        return ledger.figures(), self.steps

    def _add(self, job: Job, arrival: float, live: dict[int, Told], texts: dict[int, list[int]]) -> None:
        self.num_requests += 1
        tokens: list[int] = []
        for token, count in job.prompt:
            tokens += texts.get(token) or [token % self.vocab_size] * count
        live[self.num_requests] = Told(job, arrival)
        request = job.request(self.num_requests, time.monotonic(), tokens)
        self.engine.add(msgspec.structs.replace(request, cache_salt=str(self.num_served)))

    def _sleep_until(self, moment: float) -> None:
        """Until just before ``moment`` of the clock: sleeps end late."""
        self.sleep(max(0.0, moment - self.clock() - 0.0002))


def calibrate(driver: Driver, seed: int) -> tuple[float, Steps]:
    """Time steps of many shapes; returns requests a second in the largest loop, and the steps."""
    speed, steps = 0.0, Steps()
    for clients, count in CALIBRATION:
        figures, some = driver.serve(ClosedLoop(count, 96, 32, 0.9, clients, seed=seed * 100 + clients))
        speed, steps = figures["requests_per_second"], steps + some
    return speed, steps


def workloads(speed: float, count: int) -> list[tuple[str, Callable[[], Workload]]]:
    """Five workloads for an engine that does ``speed`` requests a second."""
    return [
        ("one client", lambda: ClosedLoop(count // 5, 96, 32, 0.9, 1, seed=11)),
        ("eight clients", lambda: ClosedLoop(count, 96, 32, 0.9, 8, seed=12)),
        ("poisson", lambda: Sessions(SHORT, 0.6 * speed, count, seed=13)),
        ("bursts", lambda: Sessions(SHORT, 0.5 * speed, count, burstiness=0.25, seed=14)),
        ("conversations", lambda: Sessions(TALK, 0.5 * speed, count, seed=15)),
    ]


def predict(cost: CostModel, info: EngineInfo, engine: EngineConfig, depth: int, workload: Workload) -> dict[str, Any]:
    """The same jobs on a virtual clock."""
    sizes = Sizes(info.num_kv_blocks, info.block_size, info.max_num_seqs, info.max_num_batched_tokens, depth)
    return Simulation(Fleet(cost, sizes, cache=engine.cache, scheduler=engine.scheduler), workload, Targets()).run()


def compare(driver: Driver, info: EngineInfo, config: EngineConfig, count: int) -> dict[str, Any]:
    """Measure and predict each workload, of ``count`` requests; calibration comes before and after each."""
    calibrate(driver, seed=99)  # the first steps compile and warm caches
    speed, last = calibrate(driver, seed=0)
    calibrations, runs = [last], []
    for number, (name, make) in enumerate(workloads(speed, count), 1):
        runs.append((name, make, *driver.serve(make())))
        calibrations.append(calibrate(driver, seed=number)[1])
    every = sum(calibrations, Steps())
    cost = fit(every.works, every.seconds)
    rows = []
    for (name, make, figures, own), before, after in zip(runs, calibrations, calibrations[1:], strict=False):
        near = before + after
        models: dict[str, CostModel] = {
            "predicted": cost.as_of(near.works, near.seconds),
            "replayed": Replayed(cost, own.works, own.seconds),
        }
        said = {how: predict(model, info, config, driver.engine.depth, make()) for how, model in models.items()}
        rows.append(_row(name, said, figures))
    return {
        "steps_timed": cost.num_steps,
        "median_error_of_fit": cost.error,
        "figures": len(rows) * len(FIGURES),
        **{f"within_{how}": sum(row["within"][how] for row in rows) for how in ("predicted", "replayed")},
        "rows": rows,
    }


def _row(name: str, said: dict[str, dict[str, Any]], measured: dict[str, Any]) -> dict[str, Any]:
    """Each figure as it was measured, and the relative error of each prediction."""
    row: dict[str, Any] = {"workload": name, "requests": measured["requests"], "within": dict.fromkeys(said, 0)}
    for figure, percent, aim in FIGURES:
        label = f"{figure}_{percent}" if percent else figure
        real = measured[figure][percent] if percent else measured[figure]
        row[label] = {"measured": real}
        for how, figures in said.items():
            error = (figures[figure][percent] if percent else figures[figure]) / real - 1
            row[label][how] = round(error, 4)
            row["within"][how] += abs(error) <= aim
    return row
